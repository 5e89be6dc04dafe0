"""Signals that ask for a clean stop: the first is remembered, the second ends at once."""

from __future__ import annotations

import signal
from types import FrameType

from .exit_codes import ExitCode

_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class StopSignals:
    """While open, `requested` is the exit code of the signal that came, or None."""

    def __init__(self) -> None:
        self.requested: ExitCode | None = None

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._remember) for number in _CODES}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = _CODES[signal.Signals(number)]
