"""Kills of a job (`runtime/jobs/`) at random instants, briefly; matrix/kills.py is the long version. Cases J1 and J16
of the failure table.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from matrix import kills
from moedge.runtime.jobs.journal.state import JobState
from moedge.runtime.jobs.stop import Limits
from moedge.runtime.settings.errors import BadJournal
from support.jobs import job_scale


@pytest.fixture
def kill() -> ModuleType:
    return kills


@pytest.mark.sample("15")
@pytest.mark.parametrize("kills", [15, 30])
def test_j1_j16_killed_at_random_the_job_ends_with_the_same_bytes(
    kills: int, kill: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill.ledger, "datetime", kill.OneDay)
    wrong = kill.run_fake(tmp_path, kills=kills, seed=int(os.environ.get("KILL_SEED", "1")))
    assert wrong.total() == 0
    said = capfd.readouterr().out
    assert f"{kills} kills of" in said
    assert "between answers" in said


def test_j1_the_comparison_sees_a_row_that_is_lost_duplicated_or_changed(kill: ModuleType) -> None:
    """Negative control."""
    wanted = {"out.jsonl": b'{"id":"a","text":"x"}\n{"id":"b","text":"y"}\n', "out.errors.jsonl": b""}
    rows = wanted["out.jsonl"].splitlines(keepends=True)
    assert kill.compare(wanted, wanted).total() == 0
    for broken, what in ((rows[:1], "lost"), ([*rows, rows[0]], "duplicated"), (rows[::-1], "files that differ")):
        assert kill.compare({**wanted, "out.jsonl": b"".join(broken)}, wanted)[what] == 1
    changed = {**wanted, "out.jsonl": wanted["out.jsonl"].replace(b'"x"', b'"z"')}
    assert kill.compare(changed, wanted)["changed"] == 1


def test_j1_a_resume_that_runs_finished_rows_again_is_caught(
    job: Callable[..., Any], rows_in: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the journal takes no second answer to a row."""
    rows_in(10)
    job(limits=Limits(max_rows=3))
    monkeypatch.setattr(JobState, "pending", lambda state: iter(range(state.num_rows)))
    with pytest.raises(BadJournal, match="second answer"):
        job()


@pytest.mark.slow
def test_memory_and_time_beside_the_engine_do_not_grow_with_the_rows() -> None:
    """A tenth of what bench/job_scale.py runs, and a tenth of what a job of 200,000 rows may grow by."""
    few, many = job_scale.measure(1000, 20_000)
    assert many["peak"] - few["peak"] < 10e6
