"""Which experts of a layer are asked for before its router has spoken: all, none, or those that a forecast names.

`all` never lets the lane idle but moves what nobody wants; `wanted` moves what is wanted and lets the lane idle while a
router is waited for. Which is faster follows from how many experts the tokens of a pass want together. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .policy import ExpertKey, HoldPolicy, Lru, Popular
from .popularity import Popularity
from .running_mean import RunningMean


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


class RouterLatency:
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
        self._gaps: dict[Bucket, RunningMean] = {}
        self._stalls: dict[Bucket, RunningMean] = {}

    @property
    def seconds_each(self) -> float:
        """How long an expert takes on its way; 0 before any was seen."""
        moved = self._nbytes_moved()
        return self._seconds_busy() / moved * self.nbytes if moved else 0.0

    def mean(self, tokens: int, first: bool = False) -> Wait:
        """For passes of about so many tokens, before the `first` layer or another; the stall is one without guesses."""
        bucket = (tokens.bit_length(), first)
        return Wait(_mean(self._gaps, bucket), _mean(self._stalls, bucket))

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
        self._gaps.setdefault(bucket, RunningMean(_NEWEST)).observe((self._clock() - self._since) / each)
        if not guessed:
            self._stalls.setdefault(bucket, RunningMean(_NEWEST)).observe(stall / each)


def _mean(means: Mapping[Bucket, RunningMean], bucket: Bucket) -> float:
    mean = means[bucket].value if bucket in means else None
    return _FIRST if mean is None else mean


class Mode(StrEnum):
    ALL = "all"
    WANTED = "wanted"
    FORECAST = "wanted+forecast"


def guesses(gap: float) -> int:
    """How many experts are guessed for a lane that would idle for `gap` times that an expert takes."""
    return ceil(gap) + 1


# What a read costs beside the time of the disk: memory's, and a thread's.
_EFFORT = 0.05


def saved(gap: float, stall: float, precision: float) -> float:
    """What guesses save, in times that an expert takes: right ones that fit the gap, less wrong ones beyond it.

    No more than `stall`, for which compute waits without them: reads that hide behind compute need no guessing.
    """
    late = guesses(gap) - gap
    return min(precision * gap, stall) - (1.0 - precision) * late - _EFFORT * guesses(gap)


class ModeChoice:
    """The mode of a layer for a pass of so many tokens; `forced` is one for all of them."""

    def __init__(self, popularity: Popularity, forced: Mode | None = None) -> None:
        self._popularity = popularity
        self._forced = forced
        # Tokens of one text choose alike: measured union over that of tokens that choose independently.
        self._alike = {layer: RunningMean(_NEWEST, 1.0) for layer in popularity.layers}

    def choose(self, layer: int, tokens: int, held: Collection[int], wait: Wait, precision: float) -> Mode:
        """The cheapest in experts to wait for; `held` need not come, guesses are right with `precision`."""
        if self._forced is not None:
            return self._forced
        chances = self._popularity.layers[layer].wanted_by(tokens)
        num_wanted = float(chances.sum() - chances[list(held)].sum()) * (self._alike[layer].value or 0.0)
        costs = {
            Mode.ALL: len(chances) - len(held),
            Mode.WANTED: num_wanted + wait.gap,
            Mode.FORECAST: num_wanted + wait.gap - saved(*wait, precision),
        }
        return min(costs, key=lambda mode: costs[mode])

    def saw(self, layer: int, tokens: int, num_wanted: int) -> None:
        """What a pass wanted of a layer; before `popularity` has counted it."""
        expected = float(self._popularity.layers[layer].wanted_by(tokens).sum())
        self._alike[layer].observe(num_wanted / expected)


class Hold(StrEnum):
    POPULAR = "popular"
    LRU = "lru"


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """`stream` is the mode of every layer and pass, chosen for each by its cost where it is None."""

    stream: Mode | None = None
    hold: Hold = Hold.POPULAR

    def policy(
        self,
        held: Iterable[ExpertKey],
        nbytes: Mapping[int, int],
        chances: Mapping[int, npt.NDArray[np.float64]],
    ) -> HoldPolicy:
        return Lru(held, nbytes) if self.hold is Hold.LRU else Popular(held, nbytes, chances)


DEFAULTS = ExpertOptions()
