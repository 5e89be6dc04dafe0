"""Lines of progress at the widths that terminals have, as text."""

import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from moedge.cli.views.progress import (
    BarProgress,
    PlainProgress,
    SmoothedLeft,
    bar_stage,
    facts,
    left_text,
    plain_line,
    plain_stage,
)
from moedge.runtime.settings.stages import Stage, Watcher, stage, watching

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (40, 60, 80, 200)
GIB = 1 << 30
RAM_NBYTES = 20 * GIB


@dataclass
class FakeEta:
    done: int = 67
    total: int = 300
    failed: int = 2
    generated_tok_s: float = 1082.4
    prompt_tok_s: float = 1319.2
    seconds_left: float | None = 359.0
    resident_nbytes: int = 630 << 20
    hit_rate: float | None = 0.93
    workers = None

    @property
    def share(self) -> float:
        return self.done / self.total


def console(width: int) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=width, color_system=None, legacy_windows=False), stream


def last_frame(text: str) -> str:
    """What stands on the line after the last redraw, without control sequences."""
    text = re.sub(r"\x1b\[\?25[lh]", "", text)
    frames = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", frame) for frame in re.split(r"\r", text)]
    return next(frame for frame in reversed(frames) if frame.strip()).strip("\n")


def golden(name: str, text: str) -> None:
    """Compares with the kept capture; with WRITE_GOLDEN set, keeps this one."""
    path = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def bar(width: int, eta: FakeEta, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(SmoothedLeft, "of", lambda self, eta: eta.seconds_left)
    wide, stream = console(width)
    with BarProgress(wide, eta.total, RAM_NBYTES) as progress:
        progress.show(eta)  # type: ignore[arg-type]
    return last_frame(stream.getvalue())


ETAS = {
    "usual": FakeEta(),
    "begun": FakeEta(done=0, failed=0, generated_tok_s=0.0, seconds_left=None, hit_rate=None),
    "large": FakeEta(123_456, 1_000_000, 12_345, 98_765.4, 1e5, 86_399.0, 19 * GIB, None),
    "last row": FakeEta(299, 300, 0, 3.21, 0.0, 0.2, hit_rate=1.0),
}


def test_the_bar_of_a_job_fits_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    for width in WIDTHS:
        for name, eta in ETAS.items():
            line = bar(width, eta, monkeypatch)
            assert "\n" not in line, "one line"
            assert len(line) <= width
            assert "…" not in line, "nothing is cut"
            assert f"{eta.done:,}/{eta.total:,} rows" in line
            lines.append(f"{width:3} {name:8} |{line.rstrip()}")
    golden("progress.txt", "\n".join(lines) + "\n")


def test_what_a_narrow_terminal_leaves_out_comes_back_with_width(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {width: bar(width, FakeEta(), monkeypatch) for width in WIDTHS}
    assert "left 5:59" in shown[40]
    assert "tok/s" not in shown[40]
    assert "2 failed" in shown[60]
    assert "1,082 tok/s" in shown[80]
    assert "RAM 0.62/20.00 GiB" in shown[80]
    assert "expert hits 93%" in shown[200]
    assert "━" in shown[200]


def test_a_stage_shows_bytes_and_goes_when_it_is_done() -> None:
    lines = []
    for width in WIDTHS:
        wide, stream = console(width)
        doing, size = "quantizing weights to int4", 4 * GIB
        with watching(partial(bar_stage, wide)), stage(doing, size, "about 4 GiB, once") as advance:
            advance(GIB)
        text = stream.getvalue()
        assert text.startswith("about 4 GiB, once\n")
        frame = last_frame(text)
        assert len(frame) <= width
        assert "quantizing weights to int4" in frame
        lines.append(f"{width:3} |{frame.rstrip()}")
    assert "1.0/4.0 GiB" in lines[-1]
    golden("stage.txt", "\n".join(lines) + "\n")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(clock: Callable[[], float]) -> tuple[Watcher, io.StringIO]:
    stream = io.StringIO()
    return partial(plain_stage, Console(file=stream, width=80), now=clock), stream


def test_a_log_gets_a_line_every_ten_seconds() -> None:
    clock = Clock()
    stages, stream = plain(clock)
    with stages(Stage("loading weights", 100 << 20)) as advance:
        for _ in range(25):
            clock.now += 1
            advance(4 << 20)
    assert stream.getvalue().splitlines() == [
        "loading weights: 8 MiB of 100 MiB, 4 MiB/s, left 23 s",
        "loading weights: 48 MiB of 100 MiB, 4 MiB/s, left 13 s",
        "loading weights: 88 MiB of 100 MiB, 4 MiB/s, left 3 s",
    ]


def test_a_stage_within_a_stage_is_part_of_it() -> None:
    stages, stream = plain(Clock())
    with watching(stages), stage("measuring", announcement="once"), stage("loading", 5, "never said") as advance:
        advance(5)
    assert stream.getvalue() == "once\n"


def test_nobody_needs_to_watch() -> None:
    with stage("loading", 5, "not shown") as advance:
        advance(5)


def test_the_time_left_is_smoothed_and_never_zero() -> None:
    clock = Clock()
    smoothed, eta = SmoothedLeft(clock), FakeEta(seconds_left=359.0)
    assert smoothed.of(eta) is None, "one pass speaks for nothing"  # type: ignore[arg-type]
    clock.now, eta.seconds_left = 4.0, 100.0
    assert smoothed.of(eta) == pytest.approx(100)  # type: ignore[arg-type]
    clock.now, eta.seconds_left = 5.0, 60.0
    between = smoothed.of(eta)  # type: ignore[arg-type]
    assert between is not None
    assert 60 < between < 99, "it approaches a new forecast"
    eta.seconds_left = 1000.0
    assert smoothed.of(eta) == pytest.approx(1000), "and takes one that is far off"  # type: ignore[arg-type]
    assert left_text(0.0) == "almost done"
    assert left_text(59.4) == "left 59 s"
    assert left_text(59.9) == "left 1:00"


def test_a_plain_line_says_what_a_wide_bar_says() -> None:
    shown = facts(FakeEta(), None, RAM_NBYTES)  # type: ignore[arg-type]
    line = plain_line(FakeEta(), None, RAM_NBYTES)  # type: ignore[arg-type]
    assert line.startswith("22%  67/300 rows  2 failed")
    assert all(text.strip() in line for text in shown.values())
    wide, stream = console(80)
    progress = PlainProgress(wide, RAM_NBYTES)
    progress.print(FakeEta())  # type: ignore[arg-type]
    assert "67/300 rows" in stream.getvalue()
