"""Guesses what the next layer wants before its router has chosen, and measures how much such guesses are worth.

A guess is what the next layer's router makes of this layer's hidden states. A wrong one costs only bandwidth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch

from .routing_stats import RoutingStats, RunningMean

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
    """Call `guess` for the layer that comes next, then `observe` with what it wanted.

    `routers` maps a layer to the weights [E, D] of its router; corrections that it adds to its scores are left out.
    """

    stats: RoutingStats
    routers: Mapping[int, torch.Tensor]
    counts: ForecastCounts = field(default_factory=ForecastCounts)
    # The fraction of right guesses, by layer.
    _precision: dict[int, RunningMean] = field(default_factory=dict)
    _guesses: list[int] = field(default_factory=list)

    def guess(self, layer: int, hidden: torch.Tensor, per_token: int, held: Collection[int], most: int) -> list[int]:
        """At most `most` experts of `layer` that are not held, likeliest first; none where its router is not known.

        hidden [T, D] are the states that the experts of the layer before receive; a token chooses `per_token` experts.
        """
        router = self.routers.get(layer)
        if router is None or router.shape[1] != hidden.shape[1]:
            return []
        scores = torch.nn.functional.linear(hidden, router.to(hidden.dtype)).float().softmax(-1)
        best = scores.topk(min(per_token, router.shape[0]), dim=-1)
        # Weighed by its score: a token's last choice is often wrong here, its first one almost never.
        wanted = torch.zeros(router.shape[0], device=hidden.device)
        wanted.index_add_(0, best.indices.reshape(-1), best.values.reshape(-1))
        self._guesses = _best(wanted.cpu(), held, most)
        return self._guesses

    def observe(self, layer: int, wanted: Collection[int]) -> None:
        """Compares the guesses for `layer`, if there are any, with what its router chose."""
        if self._guesses:
            precision = len(set(self._guesses) & set(wanted)) / len(self._guesses)
            self._precision.setdefault(layer, RunningMean(_NEWEST)).observe(precision)
        self._guesses = []

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
        """The fraction of a layer's guesses that is right; 0 before the first guess."""
        mean = self._precision.get(layer)
        return 0.0 if mean is None else mean.value or 0.0


def _best(expected: torch.Tensor, held: Collection[int], most: int) -> list[int]:
    """The likeliest experts that are not held and whose probability is not zero."""
    ordered = expected.argsort(descending=True, stable=True).tolist()
    # As Python floats: reading single elements of a tensor takes as long as the sort.
    values = expected.tolist()
    return list(islice((each for each in ordered if each not in held and values[each] > 0.0), most))
