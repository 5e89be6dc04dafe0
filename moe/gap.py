"""How long a router keeps the lane waiting: from a layer's last arrival until the next one has spoken. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable

# Weight of the newest measurement in a running mean.
_NEWEST = 0.1
# Before anything was measured, in times that an expert takes.
_FIRST = 2.0


class RouterGap:
    """In times that an expert takes, by the size of passes, which decides how long compute takes.

    `seconds_busy` and `nbytes_moved` are the lane's counters, an expert has `nbytes`.
    """

    def __init__(
        self,
        seconds_busy: Callable[[], float],
        nbytes_moved: Callable[[], int],
        nbytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds_busy = seconds_busy
        self._nbytes_moved = nbytes_moved
        self.nbytes = nbytes
        self._clock = clock
        self._since: float | None = None
        self._means: dict[int, float] = {}

    @property
    def seconds_each(self) -> float:
        """How long an expert takes on its way; 0 before any was seen."""
        moved = self._nbytes_moved()
        return self._seconds_busy() / moved * self.nbytes if moved else 0.0

    def mean(self, tokens: int) -> float:
        """For passes of about so many tokens."""
        return self._means.get(tokens.bit_length(), _FIRST)

    def begin(self) -> None:
        """All that was asked for has arrived: from here on the lane has nothing to do but guesses."""
        self._since = self._clock()

    def end(self, tokens: int) -> None:
        """A router has spoken."""
        each = self.seconds_each
        if self._since is None or not each:
            return
        gap, bucket = (self._clock() - self._since) / each, tokens.bit_length()
        before = self._means.get(bucket, gap)
        self._means[bucket] = before + _NEWEST * (gap - before)
