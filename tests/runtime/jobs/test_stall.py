"""The watchdog around passes (`runtime/jobs/stop.py`): a run that stands still ends within a second, resumable, with
its stacks in a file.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from moedge.offload.errors import ExitCode
from moedge.offload.stream.stream import StreamBroken
from moedge.runtime.jobs.stop import StallGuard
from moedge.runtime.settings.errors import Stalled


class Weights:
    """Passes wait on `failed`; nothing ever moves."""

    def __init__(self) -> None:
        self.nbytes_moved = 0
        self.failed = threading.Event()
        self.cause: BaseException | None = None

    def fail(self, cause: BaseException) -> None:
        self.cause = cause
        self.failed.set()

    def passes(self) -> Any:
        self.failed.wait()
        raise StreamBroken("weights stopped arriving") from self.cause
        yield


def test_bytes_that_do_not_come_end_the_run_and_the_stacks_say_where_it_stood(tmp_path: Path) -> None:
    weights, stacks = Weights(), tmp_path / "stacks"
    with pytest.raises(Stalled, match="no byte moved"), StallGuard(lambda: 0, weights, stacks, 0.05) as guard:
        for _ in guard.watched(weights.passes()):
            pass
    text = stacks.read_text()
    assert "in passes" in text
    assert "weights stopped arriving" in text
    assert "TimeoutError" in text


def test_a_pass_that_no_exception_reaches_ends_with_the_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended, released = [], threading.Event()

    def end_process(code: int) -> None:
        ended.append(code)
        released.set()

    guard = StallGuard(lambda: 0, Weights(), tmp_path / "stacks", 0.05, end_process)
    with pytest.raises(Stalled), guard:
        released.wait()
    assert ended == [ExitCode.STOPPED]
    assert "released.wait()" not in capfd.readouterr().out
    assert "test_a_pass_that_no_exception_reaches" in (tmp_path / "stacks").read_text()


def test_a_broken_stream_keeps_its_cause_with_the_stacks(tmp_path: Path) -> None:
    def passes() -> Any:
        yield
        raise StreamBroken("layer 3 could not be read") from OSError(5, "Input/output error")

    with (
        pytest.raises(StreamBroken, match="layer 3"),
        StallGuard(lambda: 0, Weights(), tmp_path / "stacks") as guard,
    ):
        for _ in guard.watched(passes()):
            pass
    assert "Input/output error" in (tmp_path / "stacks").read_text()
    assert "most recent call first" in (tmp_path / "stacks").read_text()


def test_a_run_that_works_is_left_alone(tmp_path: Path) -> None:
    work = [0]

    def passes() -> Any:
        for _ in range(60):
            time.sleep(0.005)
            work[0] += 1
            yield

    (tmp_path / "stacks").write_text("of an earlier run")
    with StallGuard(lambda: work[0], Weights(), tmp_path / "stacks", 0.1) as guard:
        assert sum(1 for _ in guard.watched(passes())) == 60
    assert not (tmp_path / "stacks").exists()
