"""Detects a run that makes no progress, dumps its stacks and stops it. Distinguishes slow from stuck. Torch-free."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import TracebackType

LIMIT_SECONDS = 120.0
_CHECKS_PER_LIMIT = 20


class Pace(Enum):
    """What the watchdog observed last."""

    WORKING = "working"
    SLOW = "waiting for bytes"
    STUCK = "stuck"


class Watchdog:
    """While entered, a thread watches two counters; if neither changes for `limit_seconds`, the run is stuck.

    `work` counts the progress of the run (passes, rows), `nbytes_moved` the bytes that a lane has moved. When the run
    is stuck, `dump` writes all stacks, by default to stderr, and `stop` is called once, on the watching thread, with a
    sentence that says for how long nothing moved.
    """

    def __init__(
        self,
        work: Callable[[], int],
        nbytes_moved: Callable[[], int],
        stop: Callable[[str], None],
        limit_seconds: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        dump: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._nbytes_moved = nbytes_moved
        self._stop = stop
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._dump = dump or _dump_to_stderr
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._counts = (-1, -1)
        self._changed_at = clock()
        self.pace = Pace.WORKING

    def __enter__(self) -> Watchdog:
        self._changed_at = self._clock()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()

    def check(self) -> Pace:
        """Checks the counters once. The first STUCK stops the run."""
        counts = (self._work(), self._nbytes_moved())
        if counts != self._counts:
            self.pace = Pace.WORKING if counts[0] != self._counts[0] else Pace.SLOW
            self._counts, self._changed_at = counts, self._clock()
        elif self.pace is not Pace.STUCK and self._clock() - self._changed_at >= self._limit_seconds:
            self.pace = Pace.STUCK
            self._dump()
            self._stop(f"nothing was computed and no byte moved for {self._limit_seconds:.0f} s")
        return self.pace

    def _watch(self) -> None:
        while not self._left.wait(self._limit_seconds / _CHECKS_PER_LIMIT):
            self.check()


def _dump_to_stderr() -> None:
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
