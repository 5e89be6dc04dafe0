"""Prompts on their way through an engine: passes that end whole, finished answers, and text as it is generated."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..engine.engine import Engine, Metrics
from ..engine.sequence import Sequence
from ..jobs.encode import Choices, RowEncoder
from ..jobs.run import AnswerText, OpenRow
from ..rows.row import Row


class DeferredInterrupt:
    """While open, Ctrl-C makes `requested` true; pressed again, it raises KeyboardInterrupt.

    Leaving it without an error then raises KeyboardInterrupt. Other threads than the main one are never interrupted,
    and a handler of the caller's own stays in force.
    """

    def __init__(self) -> None:
        self.requested = False
        self._installed = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.requested and kind is None:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that was checked: its row, and the token ids and settings of each of its answers."""

    row: Row
    choices: Choices
    prompt: str | None


class Generation:
    """The prompts of one call."""

    def __init__(self, engine: Engine, encoder: RowEncoder) -> None:
        self._engine = engine
        self._encoder = encoder

    def passes(self, requests: Iterable[Request]) -> Iterator[list[OpenRow]]:
        """Runs `requests`, in their order, as memory allows; yields after every pass what it finished."""
        engine, waiting = self._engine, iter(requests)
        open_rows: dict[Sequence, OpenRow] = {}
        while True:
            while engine.scheduler.has_capacity and (request := next(waiting, None)) is not None:
                opened = OpenRow.start(request.row, request.choices, self._encoder)
                open_rows |= dict.fromkeys(opened.sequences, opened)
                for sequence in opened.first:
                    engine.add(sequence)
            if not engine.busy:
                return
            finished = []
            for sequence in self.step():
                opened = open_rows.pop(sequence)
                opened.num_open -= 1
                if not opened.num_open:
                    finished.append(opened)
            yield finished

    def text(self, sequence: Sequence, text: AnswerText) -> Iterator[str]:
        """The text of one sequence, a piece per pass; pieces do not change any more."""
        self._engine.add(sequence)
        while self._engine.busy:
            self.step()
            if piece := text.take():
                yield piece
        text.finish()
        if piece := text.take():
            yield piece

    def step(self) -> list[Sequence]:
        with DeferredInterrupt():
            return self._engine.step()


Advance = Callable[[int, Metrics], None]


@contextmanager
def progress_bar(total: int, wanted: bool, what: str = "prompts", done: int = 0) -> Iterator[Advance]:
    """A bar on stderr, or nothing; to be called with how many of `what` a pass finished."""
    if not wanted or not total:
        yield lambda count, metrics: None
        return
    columns = BarColumn(), MofNCompleteColumn(), TextColumn(f"{what}  {{task.description}}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task, begun = progress.add_task("starting", total=total, completed=done), time.perf_counter()

        def advance(count: int, metrics: Metrics) -> None:
            seconds = time.perf_counter() - begun
            tokens = f"{metrics.generated_tokens / seconds:,.1f} tok/s out, {metrics.prompt_tokens / seconds:,.1f} in"
            progress.update(task, advance=count, description=tokens)

        yield advance
