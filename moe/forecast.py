"""Guesses what the next layer wants before its router has chosen, and measures how much such guesses are worth.

Three predictors are compared on the model at hand: the next layer's router applied to this layer's hidden states, what
usually follows this layer's choices, and what is popular. A wrong guess costs only bandwidth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch

from .groups import ExpertGroups
from .routing_stats import RoutingStats
from .running_mean import RunningMean


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Predicts with the layers' own routers; `routers` maps a layer to its weights [E, D].

    Corrections that a router adds to its scores are left out.
    """

    routers: Mapping[int, torch.Tensor]

    def expected(self, layer: int, hidden: torch.Tensor, per_token: int) -> torch.Tensor | None:
        """How likely each expert of `layer` is wanted [E], up to a common factor; None without a router.

        hidden [T, D] are the states that the experts of the layer before receive.
        """
        router = self.routers.get(layer)
        if router is None or router.shape[1] != hidden.shape[1]:
            return None
        scores = torch.nn.functional.linear(hidden, router.to(hidden.dtype)).float().softmax(-1)
        best = scores.topk(min(per_token, router.shape[0]), dim=-1)
        # Weighed by its score: a token's last choice is often wrong here, its first one almost never.
        wanted = torch.zeros(router.shape[0], device=hidden.device)
        wanted.index_add_(0, best.indices.reshape(-1), best.values.reshape(-1))
        return wanted.cpu()


LOOK_AHEAD, AFFINITY, POPULARITY = "look-ahead", "affinity", "popularity"
# Weight of the newest measurement in a running mean.
_NEWEST = 0.1


@dataclass(slots=True)
class ForecastCounts:
    """Prefetches `issued`, those of them `used`, cache `misses` of the same layers, time `saved` in expert reads."""

    issued: int = 0
    used: int = 0
    misses: int = 0
    saved: float = 0.0


@dataclass(slots=True)
class Forecast:
    """Call `guess` for the layer that comes next, then `observe` with what it wanted."""

    stats: RoutingStats
    look_ahead: LookAhead
    counts: ForecastCounts = field(default_factory=ForecastCounts)
    # The fraction of right guesses, by predictor and layer.
    _precision: dict[tuple[str, int], RunningMean] = field(default_factory=dict)
    _guesses: dict[str, list[int]] = field(default_factory=dict)

    def guess(
        self, layer: int, groups: ExpertGroups, hidden: torch.Tensor | None, held: Collection[int], most: int
    ) -> list[int]:
        """At most `most` experts of `layer` that are not held, by the predictor that was right most often there.

        `groups` and `hidden` [T, D] are those of the layer before; `hidden` is None where that was in another pass.
        """
        popularity, tokens, per_token = self.stats.popularity.layers[layer], *groups.expert_ids.shape
        expected: dict[str, torch.Tensor | None] = {POPULARITY: torch.from_numpy(popularity.wanted_by(tokens))}
        if hidden is not None:
            expected[LOOK_AHEAD] = self.look_ahead.expected(layer, hidden, per_token)
            expected[AFFINITY] = self.stats.affinity.expected(layer, groups.counts, per_token)
        self._guesses = {way: _best(found, held, most) for way, found in expected.items() if found is not None}
        return self._guesses[max(self._guesses, key=lambda way: self._precision_of(way, layer))]

    def observe(self, layer: int, wanted: Collection[int]) -> None:
        """Compares the guesses for `layer`, if there are any, with what its router chose."""
        for way, guessed in self._guesses.items():
            if guessed:
                precision = len(set(guessed) & set(wanted)) / len(guessed)
                self._precision.setdefault((way, layer), RunningMean(_NEWEST)).observe(precision)
        self._guesses = {}

    def count(self, begun: Collection[int], missing: Collection[int], idle: float) -> None:
        """Counts a layer whose router has chosen: the guesses whose reads had `begun`, and all `missing` experts.

        Estimates the time saved, in expert reads: at most `idle`, minus wrong reads that did not fit into it.
        """
        used = len(set(begun) & set(missing))
        wrong = len(begun) - used
        self.counts.issued += len(begun)
        self.counts.used += used
        self.counts.misses += len(missing)
        self.counts.saved += min(used, idle) - max(0.0, wrong - max(0.0, idle - used))

    def precision(self, layer: int) -> float:
        """The precision of the best predictor of a layer; 0 before the first guess."""
        return max((self._precision_of(way, layer) for way, each in self._precision if each == layer), default=0.0)

    def _precision_of(self, way: str, layer: int) -> float:
        mean = self._precision.get((way, layer))
        return 0.0 if mean is None else mean.value or 0.0

    @property
    def best(self) -> str | None:
        """The predictor that is best in most layers; None before the first guess."""
        best: dict[int, str] = {}
        for way, layer in self._precision:
            if layer not in best or self._precision_of(way, layer) > self._precision_of(best[layer], layer):
                best[layer] = way
        votes: defaultdict[str, int] = defaultdict(int)
        for way in best.values():
            votes[way] += 1
        return max(votes, key=lambda way: votes[way], default=None)


def _best(expected: torch.Tensor, held: Collection[int], most: int) -> list[int]:
    """The likeliest experts that are not held and whose probability is not zero."""
    ordered = expected.argsort(descending=True, stable=True).tolist()
    # As Python floats: reading single elements of a tensor takes as long as the sort.
    values = expected.tolist()
    return list(islice((each for each in ordered if each not in held and values[each] > 0.0), most))
