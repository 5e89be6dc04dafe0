"""Shows progress: a bar on a terminal, lines every ten seconds elsewhere, events for scripts.

A job has rows; what is done before its first pass (loading, quantizing, measuring) comes in stages with bytes.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Column, Table
from rich.text import Text

from ...formatting import clock, duration, fit, short_duration, speed
from ...offload.budget import gib
from ...runtime.settings.errors import counted
from ...runtime.settings.stages import Advance, Stage, Watcher
from .eta import Eta


class SafeStream:
    """The part of a text stream that rich and print use; writes nothing after the first failure."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._stream.write(text)
            except OSError:
                self._gone = True
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except OSError:
                self._gone = True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def say(console: Console, text: str) -> None:
    """Prints lines as they are, on a terminal wrapped at spaces."""
    console.print(fit(text, console.width if console.is_terminal else None), markup=False, soft_wrap=True)


SCHEMA = "moedge.events/6"


class Events:
    """Prints events if `wanted`."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._stream = SafeStream(sys.stdout) if wanted else None

    def emit(self, event: str, **facts: Any) -> None:
        if self._stream is None:
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"schema": SCHEMA, "event": event, "at": at, **facts}, allow_nan=False)
        self._stream.write(line + "\n")
        # Flush every line: a pipe would buffer it, and its reader needs it now.
        self._stream.flush()


PLAIN_INTERVAL_S = 10.0
EVENT_INTERVAL_S = 1.0


class Progress:
    """A context that is shown the eta after every pass, and prints it at most every `interval_s` seconds; this one
    prints nothing."""

    interval_s = 0.0

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def show(self, eta: Eta) -> None:
        now = time.monotonic()
        if now - self._shown >= self.interval_s:
            self._shown = now
            self.print(eta)

    def print(self, eta: Eta) -> None:
        """Nothing here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing here."""


class PlainProgress(Progress):
    """For logs: a line every ten seconds."""

    interval_s = PLAIN_INTERVAL_S

    def __init__(self, console: Console, ram_nbytes: int) -> None:
        super().__init__()
        self._console = console
        self._ram_nbytes = ram_nbytes
        self._left = SmoothedLeft()

    def show(self, eta: Eta) -> None:
        self._left.of(eta)
        super().show(eta)

    def print(self, eta: Eta) -> None:
        say(self._console, plain_line(eta, self._left.of(eta), self._ram_nbytes))


class EventProgress(Progress):
    """For scripts: an event every second."""

    interval_s = EVENT_INTERVAL_S

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    def print(self, eta: Eta) -> None:
        self._events.emit(
            "progress",
            done=eta.done,
            failed=eta.failed,
            rows=eta.total,
            tokens=eta.tokens,
            tokens_left=eta.tokens_left,
            generated_tok_s=eta.generated_tok_s,
            prompt_tok_s=eta.prompt_tok_s,
            seconds_left=eta.seconds_left,
            resident_nbytes=eta.resident_nbytes,
        )


class RowsColumn(ProgressColumn):
    """`67/300 rows`."""

    def render(self, task: Task) -> Text:
        total = f"{task.total or 0:,.0f}"
        return Text(f"{task.completed:>{len(total)},.0f}/{total} rows", style="progress.download")


class FittingProgress(RichProgress):
    """Rich's progress, without the columns for which the console is too narrow.

    The columns come in the order of display, each with its rank: of those that do not fit, the highest rank goes first.
    """

    def __init__(self, ranked: Iterable[tuple[int, ProgressColumn]], console: Console, transient: bool = False) -> None:
        self._ranked = list(ranked)
        # Rich draws once while it is made, before it has a console.
        self._shown_on = console
        super().__init__(*(column for _, column in self._ranked), console=console, transient=transient)

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        tasks = list(tasks)
        kept: set[ProgressColumn] = set()
        left = self._shown_on.width
        for _, column in sorted(self._ranked, key=lambda ranked: ranked[0]):
            needs = max((_width(column, task, self._shown_on) for task in tasks), default=0)
            left -= needs + (_APART if kept else 0)
            if left < 0:
                break
            kept.add(column)
        columns = [column for _, column in self._ranked if column in kept]
        # A bar takes what is left of the line; without one the columns stay together on the left.
        expand = any(isinstance(column, BarColumn) for column in columns)
        table = Table.grid(
            *(column.get_table_column().copy() for column in columns),
            padding=(0, _APART, 0, 0),
            pad_edge=False,
            expand=expand,
        )
        for task in tasks:
            table.add_row(*(column(task) for column in columns))
        return table


# Spaces between columns.
_APART = 2
# A shorter bar says less than the per cent beside it.
_LEAST_BAR = 10


def _width(column: ProgressColumn, task: Task, console: Console) -> int:
    if isinstance(column, BarColumn):
        return _LEAST_BAR
    return max(console.measure(column(task)).maximum, column.get_table_column().min_width or 0)


def _one_line(min_width: int = 0, right: bool = False) -> Column:
    return Column(no_wrap=True, min_width=min_width, justify="right" if right else "left")


def _field(name: str, min_width: int = 0) -> TextColumn:
    """A field of the task, which keeps its width while its digits change."""
    return TextColumn(f"{{task.fields[{name}]}}", markup=False, table_column=_one_line(min_width))


class BarProgress(Progress):
    """Per cent of tokens, rows done, failed, time left, tokens per second, memory and, if experts stream, hit rate.

    `ram_nbytes` is the RAM budget.
    """

    def __init__(self, console: Console, total: int, ram_nbytes: int) -> None:
        super().__init__()
        self._ram_nbytes = ram_nbytes
        self._left = SmoothedLeft()
        ranked = [
            (0, TaskProgressColumn("{task.fields[percent]}", table_column=_one_line(4, right=True))),
            (1, RowsColumn(table_column=_one_line())),
            (3, _field("failed")),
            (2, _field("left", 10)),
            (4, _field("rate", 11)),
            (5, _field("memory", 16)),
            (6, _field("experts")),
            (7, BarColumn(bar_width=None)),
        ]
        self._progress = FittingProgress(ranked, console)
        starting: dict[str, Any] = dict.fromkeys(("percent", "failed", "left", "memory", "experts"), "")
        self._task = self._progress.add_task("", total=total, **starting, rate="starting")

    def print(self, eta: Eta) -> None:
        fields: dict[str, Any] = {**facts(eta, self._left.of(eta), self._ram_nbytes)}
        self._progress.update(self._task, completed=eta.done, total=eta.total, **fields)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


# Before that, one pass, mostly of prompts, would speak for all.
_SETTLED_S = 3.0
# The share of a new forecast in the time that is shown.
_NEW = 0.2
# A forecast that differs by this factor is taken as it is.
_OFF = 3.0


class SmoothedLeft:
    """The time left for people: it counts down, and approaches new forecasts instead of jumping to them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun: float | None = None
        self._ends: float | None = None

    def of(self, eta: Eta) -> float | None:
        """Seconds; None while no forecast is worth showing."""
        now, forecast = self._now(), eta.seconds_left
        if forecast is None:
            return None
        self._begun = now if self._begun is None else self._begun
        if now - self._begun < _SETTLED_S:
            return None
        shown = 0.0 if self._ends is None else self._ends - now
        if shown <= 0 or not 1 / _OFF < (forecast + 1) / (shown + 1) < _OFF:
            shown = forecast
        shown += _NEW * (forecast - shown)
        self._ends = now + shown
        return shown


def left_text(seconds: float | None) -> str:
    """Never zero seconds for long: what takes longer than it was expected to is "almost done"."""
    if seconds is None:
        return ""
    return "almost done" if seconds < 1 else f"left {short_duration(seconds)}"


def facts(eta: Eta, seconds_left: float | None, ram_nbytes: int) -> dict[str, str]:
    """What a line of progress says beside the rows, by column; `ram_nbytes` is the RAM budget."""
    rate = eta.generated_tok_s
    return {
        "percent": f"{int(100 * eta.share):3}%",
        "failed": f"{eta.failed:,} failed",
        "left": left_text(seconds_left),
        "rate": speed(rate) if rate else "",
        # Of a job on a cluster, the memory that counts is elsewhere.
        "memory": f"RAM {eta.resident_nbytes / 2**30:.2f}/{gib(ram_nbytes)}"
        if eta.workers is None
        else counted(eta.workers, "worker"),
        "experts": "" if eta.hit_rate is None else f"expert hits {eta.hit_rate:.0%}",
    }


def plain_line(eta: Eta, seconds_left: float | None, ram_nbytes: int) -> str:
    """One line for logs: everything that a wide terminal shows, and when the job will be ready."""
    shown = facts(eta, seconds_left, ram_nbytes)
    if seconds_left is not None:
        shown["left"] += f", ready {clock(seconds_left)}"
    rows = shown.pop("percent").strip(), f"{eta.done:,}/{eta.total:,} rows"
    return "  ".join(text for text in (*rows, *shown.values()) if text)


@contextmanager
def bar_stage(console: Console, stage: Stage) -> Iterator[Advance]:
    """One line on a terminal, which goes when the stage is done; announcements stay."""
    if stage.announcement:
        say(console, stage.announcement)
    progress = FittingProgress(_stage_columns(stage), console, transient=True)
    task = progress.add_task(stage.doing, total=stage.nbytes)
    with progress:
        yield lambda nbytes: progress.advance(task, nbytes)


def _stage_columns(stage: Stage) -> list[tuple[int, ProgressColumn]]:
    doing = TextColumn("{task.description}", markup=False, table_column=_one_line())
    if stage.nbytes is None:
        return [(2, SpinnerColumn()), (0, doing), (1, TimeElapsedColumn(table_column=_one_line()))]
    return [
        (0, doing),
        (1, DownloadColumn(binary_units=True, table_column=_one_line())),
        (3, RateColumn(table_column=_one_line(10))),
        (2, LeftColumn(table_column=_one_line(10))),
        (4, BarColumn(bar_width=None)),
    ]


class RateColumn(ProgressColumn):
    """Bytes per second, in binary units as the bytes beside them."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{gib(speed)}/s", style="progress.data.speed")


class LeftColumn(ProgressColumn):
    """The time left as jobs show it; rich's own has no words."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(left_text(task.time_remaining), style="progress.remaining")


# Shorter stages need no line in a log.
_SHORT_S = 2.0


@contextmanager
def plain_stage(console: Console, stage: Stage, now: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """For logs: the announcement, and a line every ten seconds, the first after two."""
    if stage.announcement:
        say(console, stage.announcement)
    begun, done, due = now(), 0, _SHORT_S

    def advance(nbytes: int) -> None:
        nonlocal done, due
        done += nbytes
        seconds = now() - begun
        if seconds >= due:
            due = seconds + PLAIN_INTERVAL_S
            say(console, _stage_line(stage, done, seconds))

    yield advance


def _stage_line(stage: Stage, done: int, seconds: float) -> str:
    if stage.nbytes is None:
        return f"{stage.doing}, for {duration(seconds)}"
    rate, total = done / seconds, stage.nbytes or 0
    left = f", {left_text((total - done) / rate)}" if rate and total > done else ""
    return f"{stage.doing}: {gib(done)} of {gib(total)}, {gib(rate)}/s{left}"


def stages_on(console: Console) -> Watcher:
    """The watcher of stages that suits a console."""
    return partial(bar_stage if console.is_terminal else plain_stage, console)
