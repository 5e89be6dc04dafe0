"""How far a job is: a bar on a terminal, a line every ten seconds elsewhere, or nothing."""

from __future__ import annotations

import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from ..runtime.pace import Pace
from .wording import duration, gib

PLAIN_INTERVAL_S = 10.0


class ProgressView(Protocol):
    """A context manager that is shown the pace after every pass."""

    def show(self, pace: Pace) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class NoProgress:
    def show(self, pace: Pace) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class PlainProgress(NoProgress):
    """For logs: a line when ten seconds have passed since the last one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed = time.monotonic()

    def show(self, pace: Pace) -> None:
        now = time.monotonic()
        if now - self._printed >= PLAIN_INTERVAL_S:
            self._printed = now
            self._console.print(f"{pace.done:,}/{pace.total:,} rows  {rates(pace)}", markup=False, soft_wrap=True)


class BarProgress:
    """Rows done, tokens per second in and out, memory, time left."""

    def __init__(self, console: Console, total: int) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("rows  {task.description}"), TimeElapsedColumn()
        self._progress = RichProgress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=total)

    def show(self, pace: Pace) -> None:
        self._progress.update(self._task, completed=pace.done, description=rates(pace))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def rates(pace: Pace) -> str:
    left = "" if pace.seconds_left is None else f"  left {duration(pace.seconds_left)}"
    tokens = f"{pace.generated_tok_s:,.1f} tok/s out, {pace.prompt_tok_s:,.1f} in"
    return f"{tokens}  {gib(pace.resident_nbytes)}{left}"
