"""How long a router keeps the lane waiting: from a layer's last arrival until the next one has spoken. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Wait(NamedTuple):
    """In times that an expert takes: for `gap` the lane waits for a router, for `stall` compute for the lane."""

    gap: float
    stall: float


# Passes of about as many tokens; between two passes there is more to do than between two layers.
Bucket = tuple[int, bool]

# Weight of the newest measurement in a running mean.
_NEWEST = 0.1
# Before anything was measured, in times that an expert takes.
_FIRST = 2.0


class RouterGap:
    """In times that an expert takes, by the size of passes, which decides how long compute takes.

    `seconds_busy`, `nbytes_moved` and `seconds_waited` are the lane's counters, an expert has `nbytes`.
    """

    def __init__(
        self,
        seconds_busy: Callable[[], float],
        nbytes_moved: Callable[[], int],
        seconds_waited: Callable[[], float],
        nbytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds_busy = seconds_busy
        self._nbytes_moved = nbytes_moved
        self._seconds_waited = seconds_waited
        self.nbytes = nbytes
        self._clock = clock
        self._since: float | None = None
        self._waited = 0.0
        self._gaps: dict[Bucket, float] = {}
        self._stalls: dict[Bucket, float] = {}

    @property
    def seconds_each(self) -> float:
        """How long an expert takes on its way; 0 before any was seen."""
        moved = self._nbytes_moved()
        return self._seconds_busy() / moved * self.nbytes if moved else 0.0

    def mean(self, tokens: int, first: bool = False) -> Wait:
        """For passes of about so many tokens, before the `first` layer or another; the stall is one without guesses."""
        bucket = (tokens.bit_length(), first)
        return Wait(self._gaps.get(bucket, _FIRST), self._stalls.get(bucket, _FIRST))

    def begin(self) -> None:
        """All that was asked for has arrived: from here on the lane has nothing to do but guesses."""
        self._since = self._clock()

    def end(self, tokens: int, guessed: bool, first: bool = False) -> None:
        """A router has spoken, the `first` of a pass or another; whether the layer before had been `guessed`."""
        bucket = (tokens.bit_length(), first)
        each, waited = self.seconds_each, self._seconds_waited()
        stall, self._waited = waited - self._waited, waited
        if self._since is None or not each:
            return
        _mix(self._gaps, bucket, (self._clock() - self._since) / each)
        if not guessed:
            _mix(self._stalls, bucket, stall / each)


def _mix(means: dict[Bucket, float], bucket: Bucket, value: float) -> None:
    before = means.get(bucket, value)
    means[bucket] = before + _NEWEST * (value - before)
