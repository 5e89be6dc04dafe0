"""Which experts of a layer are requested before its router has chosen: all, none, or those that a forecast names.

`all` keeps the lane busy but reads experts that no token wants. `wanted` reads only wanted experts, and the lane idles
while a layer waits for its router. Which one is faster depends on how many experts the tokens of a pass want together.
Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from .running_mean import RunningMean

if TYPE_CHECKING:
    from .routing_stats import RoutingStats


class Waits(NamedTuple):
    """Waiting times in units of one expert read: `idle`, the lane waits for a router; `stall`, compute for the lane."""

    idle: float
    stall: float


# Passes with the same bit length of their token count, and whether the layer is the first of a pass: between two passes
# there is more to do than between two layers.
Bucket = tuple[int, bool]

# Weight of the newest measurement in a running mean.
_NEWEST = 0.1
# Before the first measurement, in units of one expert read.
_FIRST = 2.0


class RouterLatency:
    """Measures how long the lane idles until a router has chosen, in units of one expert read, by size of pass.

    `seconds_busy`, `nbytes_moved` and `seconds_waited` read the lane's counters; an expert has `nbytes` bytes.
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
        self._idle: dict[Bucket, RunningMean] = {}
        self._stalls: dict[Bucket, RunningMean] = {}

    @property
    def seconds_each(self) -> float:
        """The mean seconds of one expert read; 0 before the first."""
        moved = self._nbytes_moved()
        return self._seconds_busy() / moved * self.nbytes if moved else 0.0

    def mean(self, tokens: int, first: bool = False) -> Waits:
        """The mean waits of passes of about `tokens` tokens, before the `first` layer or before another one.

        The stall is that of layers without guesses.
        """
        bucket = (tokens.bit_length(), first)
        return Waits(_mean(self._idle, bucket), _mean(self._stalls, bucket))

    def begin(self) -> None:
        """Everything that was requested has arrived: from now on the lane has nothing to do except guesses."""
        self._since = self._clock()

    def forget(self) -> None:
        """Whoever computes was not waited for: when the next router has chosen tells nothing."""
        self._since = None

    def end(self, tokens: int, guessed: bool, first: bool = False) -> None:
        """A router has chosen. `guessed` says whether the layer before it was read with guesses."""
        bucket = (tokens.bit_length(), first)
        each, waited = self.seconds_each, self._seconds_waited()
        stall, self._waited = waited - self._waited, waited
        if self._since is None or not each:
            return
        self._idle.setdefault(bucket, RunningMean(_NEWEST)).observe((self._clock() - self._since) / each)
        if not guessed:
            self._stalls.setdefault(bucket, RunningMean(_NEWEST)).observe(stall / each)


def _mean(means: Mapping[Bucket, RunningMean], bucket: Bucket) -> float:
    mean = means[bucket].value if bucket in means else None
    return _FIRST if mean is None else mean


class Mode(StrEnum):
    ALL = "all"
    WANTED = "wanted"
    FORECAST = "wanted+forecast"


def num_guesses(idle: float) -> int:
    """The number of experts to guess for a lane that would idle for `idle` expert reads."""
    return ceil(idle) + 1


# The cost of a read that is not the disk's time: memory bandwidth, and a thread.
_EFFORT = 0.05


def guess_savings(idle: float, stall: float, precision: float) -> float:
    """The time that guesses save, in expert reads: right guesses that fit the idle time, minus wrong ones beyond it.

    At most `stall`, the time that compute waits without guesses: reads that hide behind compute need no guess.
    """
    late = num_guesses(idle) - idle
    return min(precision * idle, stall) - (1.0 - precision) * late - _EFFORT * num_guesses(idle)


def choose_mode(
    stats: RoutingStats, layer: int, tokens: int, held: Collection[int], waits: Waits, precision: float
) -> Mode:
    """The mode of a layer with the fewest expert reads to wait for in a pass of `tokens` tokens.

    `held` experts need no read; `precision` is the fraction of guesses that are right.
    """
    misses = stats.expected_misses(layer, tokens, held)
    costs = {
        Mode.ALL: stats.num_experts(layer) - len(held),
        Mode.WANTED: misses + waits.idle,
        Mode.FORECAST: misses + waits.idle - guess_savings(*waits, precision),
    }
    return min(costs, key=lambda mode: costs[mode])
