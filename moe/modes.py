"""Which experts of a layer are asked for before its router has spoken: all, none, or those that a forecast names.

`all` never lets the lane idle but moves what nobody wants; `wanted` moves what is wanted and lets the lane idle while a
router is waited for. Which is faster follows from how many experts the tokens of a pass want together. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from math import ceil

from .gap import Wait
from .popularity import Popularity


class Mode(StrEnum):
    ALL = "all"
    WANTED = "wanted"
    FORECAST = "wanted+forecast"


# Weight of the newest measurement in a running mean.
_NEWEST = 0.1


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
        self._alike = dict.fromkeys(popularity.layers, 1.0)

    def choose(self, layer: int, tokens: int, held: Collection[int], wait: Wait, precision: float) -> Mode:
        """The cheapest in experts to wait for; `held` need not come, guesses are right with `precision`."""
        if self._forced is not None:
            return self._forced
        chances = self._popularity.layers[layer].wanted_by(tokens)
        num_wanted = float(chances.sum() - chances[list(held)].sum()) * self._alike[layer]
        costs = {
            Mode.ALL: len(chances) - len(held),
            Mode.WANTED: num_wanted + wait.gap,
            Mode.FORECAST: num_wanted + wait.gap - saved(*wait, precision),
        }
        return min(costs, key=lambda mode: costs[mode])

    def saw(self, layer: int, tokens: int, num_wanted: int) -> None:
        """What a pass wanted of a layer; before `popularity` has counted it."""
        expected = float(self._popularity.layers[layer].wanted_by(tokens).sum())
        self._alike[layer] += _NEWEST * (num_wanted / expected - self._alike[layer])
