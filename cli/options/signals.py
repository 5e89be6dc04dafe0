"""Handles signals that stop a job: at once while no rows run, after the pass while rows run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from ...offload.errors import ExitCode

_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.TERMINATED,
}


class Stopped(BaseException):
    """A signal came while no rows were running."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code


class StopSignals:
    """While open, a signal raises `Stopped`; within `deferred`, `requested` is its exit code instead.

    A second signal ends the process at once: confirmed rows are on disk, and no cleanup may delay the exit.
    """

    def __init__(self) -> None:
        self.requested: ExitCode | None = None
        self._deferred = False
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def __enter__(self) -> Self:
        # Ignored signals stay ignored: nohup keeps a job alive this way.
        caught = [number for number in _CODES if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in caught}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that a library forked, and ends: nothing of it is to be saved or said.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        code = _CODES[signal.Signals(number)]
        if self.requested is not None:
            os._exit(code)
        self.requested = code
        if not self._deferred:
            raise Stopped(code)
