"""Detects a run that makes no progress and stops it. Distinguishes slow from stuck. Torch-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

LIMIT_SECONDS = 120.0
_CHECKS_PER_LIMIT = 20


class Watchdog:
    """While entered, a thread watches two counters; if neither changes for `limit_seconds`, the run is stuck.

    `work` counts the progress of the run (passes, rows), `nbytes_moved` the bytes that a lane has moved. When the run
    is stuck, `stop` is called once, on the watching thread, with a sentence that says for how long nothing moved.
    """

    def __init__(
        self,
        work: Callable[[], int],
        nbytes_moved: Callable[[], int],
        stop: Callable[[str], None],
        limit_seconds: float = LIMIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._nbytes_moved = nbytes_moved
        self._stop = stop
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._counts = (-1, -1)
        self._changed_at = clock()
        self.stuck = False

    def __enter__(self) -> Watchdog:
        self._changed_at = self._clock()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()

    def check(self) -> None:
        """Checks the counters once. The first time that the run is `stuck` stops it."""
        counts = (self._work(), self._nbytes_moved())
        if counts != self._counts:
            self._counts, self._changed_at = counts, self._clock()
            self.stuck = False
        elif not self.stuck and self._clock() - self._changed_at >= self._limit_seconds:
            self.stuck = True
            self._stop(f"nothing was computed and no byte moved for {self._limit_seconds:.0f} s")

    def _watch(self) -> None:
        while not self._left.wait(self._limit_seconds / _CHECKS_PER_LIMIT):
            self.check()
