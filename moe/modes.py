"""Which experts of a layer are asked for before its router has spoken: all, none, or those that a forecast names.

`all` never lets the lane idle but moves what nobody wants; `wanted` moves what is wanted and lets the lane idle while a
router is waited for. Which is faster follows from how many experts the tokens of a pass want together. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from .popularity import Popularity


class Mode(StrEnum):
    ALL = "all"
    WANTED = "wanted"
    FORECAST = "wanted+forecast"


# Weight of the newest measurement in a running mean.
_NEWEST = 0.1
# How long the lane idles for a router, before that was measured, in times that an expert takes.
_FIRST_GAP = 2.0


class ModeChoice:
    """The mode of every layer for a pass of so many tokens; `forced` is one for all of them."""

    def __init__(self, popularity: Popularity, forced: Mode | None = None) -> None:
        self._popularity = popularity
        self._forced = forced
        # Tokens of one text choose alike: measured union over that of tokens that choose independently.
        self._alike = dict.fromkeys(popularity.layers, 1.0)
        self._gaps: dict[int, float] = {}

    def choose(self, layer: int, tokens: int, held: Collection[int]) -> Mode:
        """`held` are the layer's experts that need not come."""
        if self._forced is not None:
            return self._forced
        chances = self._popularity.layers[layer].wanted_by(tokens)
        num_missing = len(chances) - len(held)
        num_wanted = (chances.sum() - chances[list(held)].sum()) * self._alike[layer]
        gap = self._gaps.get(tokens.bit_length(), _FIRST_GAP)
        return Mode.ALL if num_missing <= num_wanted + gap else Mode.WANTED

    def saw(self, layer: int, tokens: int, num_wanted: int) -> None:
        """What a pass wanted of a layer; before `popularity` has counted it."""
        expected = float(self._popularity.layers[layer].wanted_by(tokens).sum())
        self._alike[layer] += _NEWEST * (num_wanted / expected - self._alike[layer])

    def waited(self, tokens: int, gap: float) -> None:
        """For how long the lane idled until a router had spoken, in times that an expert takes."""
        bucket = tokens.bit_length()
        before = self._gaps.get(bucket, gap)
        self._gaps[bucket] = before + _NEWEST * (gap - before)
