"""Guesses what the next layer wants before its router has spoken, and how much such guesses are worth.

Three ways are asked and compared on the model at hand: the next router applied to this layer's hidden states, what
follows this layer's choices, and what is popular. A wrong guess costs bandwidth only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch

from .affinity import Affinity
from .groups import ExpertGroups
from .popularity import Popularity
from .running_mean import RunningMean


@dataclass(frozen=True, slots=True)
class LookAhead:
    """`routers` by layer: weights [E, D] of what scores its experts. Corrections of the scores are left out."""

    routers: Mapping[int, torch.Tensor]

    def expected(self, layer: int, hidden: torch.Tensor, per_token: int) -> torch.Tensor | None:
        """How likely each expert of `layer` is wanted [E], in units that serve to compare; None without a router.

        hidden [T, D] is what the experts of the layer before are given.
        """
        router = self.routers.get(layer)
        if router is None or router.shape[1] != hidden.shape[1]:
            return None
        scores = torch.nn.functional.linear(hidden, router.to(hidden.dtype)).float().softmax(-1)
        best = scores.topk(min(per_token, router.shape[0]), dim=-1)
        # A token's last choice may be no choice at all; its first is one almost surely.
        wanted = torch.zeros(router.shape[0], device=hidden.device)
        wanted.index_add_(0, best.indices.reshape(-1), best.values.reshape(-1))
        return wanted.cpu()


LOOK_AHEAD, AFFINITY, POPULARITY = "look-ahead", "affinity", "popularity"
# Weight of the newest measurement in a running mean.
_NEWEST = 0.1


@dataclass(slots=True)
class ForecastCounts:
    """Experts read on a guess, of those the right ones; what was wanted then and not held; times of an expert saved."""

    asked: int = 0
    right: int = 0
    wanted: int = 0
    saved: float = 0.0


@dataclass(slots=True)
class Forecast:
    """`guess` for the layer that comes next, then `saw` what it wanted."""

    popularity: Popularity
    affinity: Affinity
    look_ahead: LookAhead
    counts: ForecastCounts = field(default_factory=ForecastCounts)
    # Share of right ones among the first guesses, by way and layer.
    _precision: dict[tuple[str, int], RunningMean] = field(default_factory=dict)
    _guesses: dict[str, list[int]] = field(default_factory=dict)

    def guess(
        self, layer: int, groups: ExpertGroups, hidden: torch.Tensor | None, held: Collection[int], most: int
    ) -> list[int]:
        """At most `most` experts of `layer` that are not held, by the way that was right most often there.

        `groups` and `hidden` [T, D] are those of the layer before; without `hidden` it belongs to another pass.
        """
        seen, tokens, per_token = self.popularity.layers[layer], *groups.expert_ids.shape
        ways: dict[str, torch.Tensor | None] = {POPULARITY: torch.from_numpy(seen.wanted_by(tokens))}
        if hidden is not None:
            ways[LOOK_AHEAD] = self.look_ahead.expected(layer, hidden, per_token)
            ways[AFFINITY] = self.affinity.expected(layer, groups.counts, per_token)
        self._guesses = {way: _best(expected, held, most) for way, expected in ways.items() if expected is not None}
        return self._guesses[max(self._guesses, key=lambda way: self._precision_of(way, layer))]

    def saw(self, layer: int, wanted: Collection[int]) -> None:
        """What the router said of which guesses were made."""
        for way, guessed in self._guesses.items():
            if guessed:
                precision = len(set(guessed) & set(wanted)) / len(guessed)
                self._precision.setdefault((way, layer), RunningMean(_NEWEST)).observe(precision)
        self._guesses = {}

    def count(self, begun: Collection[int], missing: Collection[int], gap: float) -> None:
        """Guesses for a layer whose router has spoken: those that had `begun` to move, what was `missing` in all.

        Estimates what they saved, in times that an expert takes: at most the gap, less what wrong ones overran it.
        """
        right = len(set(begun) & set(missing))
        wrong = len(begun) - right
        self.counts.asked += len(begun)
        self.counts.right += right
        self.counts.wanted += len(missing)
        self.counts.saved += min(right, gap) - max(0.0, wrong - max(0.0, gap - right))

    def precision(self, layer: int) -> float:
        """Of the best way; 0 before any was tried."""
        return max((self._precision_of(way, layer) for way, each in self._precision if each == layer), default=0.0)

    def _precision_of(self, way: str, layer: int) -> float:
        mean = self._precision.get((way, layer))
        return 0.0 if mean is None else mean.value or 0.0

    @property
    def best(self) -> str | None:
        """The way that is best in most layers; None before any was tried."""
        best: dict[int, str] = {}
        for way, layer in self._precision:
            if layer not in best or self._precision_of(way, layer) > self._precision_of(best[layer], layer):
                best[layer] = way
        votes: defaultdict[str, int] = defaultdict(int)
        for way in best.values():
            votes[way] += 1
        return max(votes, key=lambda way: votes[way], default=None)


def _best(expected: torch.Tensor, held: Collection[int], most: int) -> list[int]:
    """The likeliest experts that are not held and not impossible."""
    ordered = expected.argsort(descending=True, stable=True).tolist()
    # As numbers of Python: to read one out of a tensor takes as long as to sort them.
    values = expected.tolist()
    return list(islice((each for each in ordered if each not in held and values[each] > 0.0), most))
