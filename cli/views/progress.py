"""Shows the progress of a job: a bar on a terminal, lines every ten seconds elsewhere, events for scripts."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import Any, Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from ...offload.budget import gib
from ...runtime.jobs.eta import Eta
from ...runtime.settings.formatting import clock, duration


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


SCHEMA = "moedge.events/4"


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


class ProgressView(Protocol):
    """A context manager that is shown the eta after every pass."""

    def show(self, eta: Eta) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class NoProgress:
    def show(self, eta: Eta) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class SeldomProgress(NoProgress):
    """Shows progress at most every `interval_s` seconds."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._shown = time.monotonic()

    def show(self, eta: Eta) -> None:
        now = time.monotonic()
        if now - self._shown >= self._interval_s:
            self._shown = now
            self.print(eta)

    def print(self, eta: Eta) -> None:
        raise NotImplementedError


class PlainProgress(SeldomProgress):
    """For logs: a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__(PLAIN_INTERVAL_S)
        self._console = console

    def print(self, eta: Eta) -> None:
        self._console.print(f"{eta.done:,}/{eta.total:,} rows  {rates(eta)}", markup=False, soft_wrap=True)


class EventProgress(SeldomProgress):
    """For scripts: an event every second."""

    def __init__(self, events: Events) -> None:
        super().__init__(EVENT_INTERVAL_S)
        self._events = events

    def print(self, eta: Eta) -> None:
        self._events.emit(
            "progress",
            done=eta.done,
            failed=eta.failed,
            rows=eta.total,
            generated_tok_s=eta.generated_tok_s,
            prompt_tok_s=eta.prompt_tok_s,
            seconds_left=eta.seconds_left,
            resident_nbytes=eta.resident_nbytes,
        )


class BarProgress:
    """Rows done, tokens per second in and out, memory, time left."""

    def __init__(self, console: Console, total: int) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("rows  {task.description}"), TimeElapsedColumn()
        self._progress = RichProgress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=total)

    def show(self, eta: Eta) -> None:
        self._progress.update(self._task, completed=eta.done, description=rates(eta))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def rates(eta: Eta) -> str:
    left = "" if eta.seconds_left is None else f"  left {duration(eta.seconds_left)}, ready {clock(eta.seconds_left)}"
    tokens = f"{eta.generated_tok_s:,.1f} tok/s out, {eta.prompt_tok_s:,.1f} in"
    return f"{tokens}  {gib(eta.resident_nbytes)}{left}"
