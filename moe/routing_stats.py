"""Statistics of routing: how often experts are chosen, which ones follow which, how many a pass wants together.

They only observe; caches, forecasts and summaries read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isclose

import numpy as np
import numpy.typing as npt
import torch

from .expected_rows import wanted_by
from .groups import ExpertGroups
from .running_mean import RunningMean


@dataclass(slots=True)
class LayerPopularity:
    """`chosen` [E] counts the tokens that chose each expert. `unions` sums, over passes, the number of wanted experts.

    `tokens` and `passes` are what both were counted over.
    """

    chosen: npt.NDArray[np.float64]
    tokens: float = 0.0
    unions: int = 0
    passes: int = 0

    @property
    def num_experts(self) -> int:
        return len(self.chosen)

    @property
    def share(self) -> float:
        """The share of the experts that a token chooses; only after an observation."""
        return float(self.chosen.sum()) / self.tokens / self.num_experts

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """The probability that a token chooses each expert [E]; uniform before the first observation."""
        # One more token, spread evenly over all experts, keeps experts that were never chosen above zero.
        per_token = self.chosen.sum() / self.tokens if self.tokens else 1.0
        return (self.chosen + per_token / len(self.chosen)) / (self.tokens + 1.0)

    def wanted_by(self, tokens: float) -> npt.NDArray[np.float64]:
        """The probability that at least one of `tokens` independent tokens chooses each expert [E]."""
        wanted: npt.NDArray[np.float64] = 1.0 - (1.0 - np.minimum(self.probabilities, 1.0)) ** tokens
        return wanted


class Popularity:
    """How often tokens chose each expert; `layers` maps the model's layer index to the counts of a layer."""

    def __init__(self, num_experts: Mapping[int, int]) -> None:
        self.layers = {layer: LayerPopularity(np.zeros(count)) for layer, count in num_experts.items()}

    def observe(self, layer: int, tokens: int, counts: Sequence[int]) -> None:
        """Adds one layer of a pass: its number of tokens, and the number of tokens that chose each expert [E]."""
        stats, chosen = self.layers[layer], np.asarray(counts)
        stats.chosen += chosen
        stats.tokens += tokens
        stats.unions += int(np.count_nonzero(chosen))
        stats.passes += 1

    def wanted_share(self, tokens: float, share: float) -> float:
        """The share of a layer's experts that `tokens` independent tokens want together, by the counts so far.

        The mean over the layers whose tokens each want a `share` of the experts; without such layers, and before the
        first observation, all experts are as likely.
        """
        layers = [each for each in self.layers.values() if each.tokens and isclose(each.share, share, rel_tol=1e-3)]
        if not layers:
            return wanted_by(tokens, share)
        return float(np.mean([each.wanted_by(tokens).mean() for each in layers]))

    def start_counting(self) -> None:
        """Forgets the unions of the passes so far; they do not belong to the job."""
        for stats in self.layers.values():
            stats.unions = stats.passes = 0

    @property
    def unions(self) -> list[float]:
        """The fraction of a layer's experts that a pass wanted, by layer, averaged over passes."""
        layers = self.layers.values()
        return [stats.unions / (stats.passes * stats.num_experts) if stats.passes else 0.0 for stats in layers]

    @property
    def union(self) -> float | None:
        """The fraction of experts that a pass wanted, averaged over layers and passes; None before the first pass."""
        visits = sum(stats.passes * stats.num_experts for stats in self.layers.values())
        return sum(stats.unions for stats in self.layers.values()) / visits if visits else None


# A pass adds at most this many tokens to the tables, and all tables together take at most this many bytes: enough to
# predict with, and too little to slow a pass down.
MAX_TOKENS = 64
MAX_NBYTES = 32 << 20


class Affinity:
    """Counts which expert a token chose after which expert of the layer before.

    `follows` maps a layer to a float32 table [experts of the layer before, E]. There are no tables where they would
    take more than MAX_NBYTES together. `num_experts` lists the layers that have experts, in the model's order.
    """

    def __init__(self, num_experts: Mapping[int, int], device: torch.device | str = "cpu") -> None:
        shapes = self.shapes(num_experts)
        self.follows = {layer: torch.zeros(shape, device=device) for layer, shape in shapes.items()}
        self._before: torch.Tensor | None = None

    @staticmethod
    def shapes(num_experts: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """The shape of every table, by layer."""
        shapes = {layer: (num_experts[before], num_experts[layer]) for before, layer in pairwise(num_experts)}
        fits = sum(4 * before * count for before, count in shapes.values()) <= MAX_NBYTES
        return shapes if fits else {}

    def observe(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Adds a layer's choices [T, A]. The layer before it, where there is one, is the one observed last."""
        step = -(-len(expert_ids) // MAX_TOKENS)
        chosen, before, self._before = expert_ids[::step], self._before, expert_ids[::step]
        table = self.follows.get(layer)
        if table is None or before is None or len(before) != len(chosen):
            return
        pairs = (before.unsqueeze(2) * table.shape[1] + chosen.unsqueeze(1)).reshape(-1)
        table.view(-1).index_add_(0, pairs, torch.ones(len(pairs), device=table.device))

    def expected(self, layer: int, counts: Sequence[int], per_token: int) -> torch.Tensor | None:
        """The expected number of tokens that choose each expert of `layer` [E], up to a common factor.

        `counts` [E of the layer before] says how many tokens chose each expert there. None without a table.
        """
        table = self.follows.get(layer)
        if table is None:
            return None
        table = table.cpu()
        times = (table.sum(1, keepdim=True) / per_token).clamp_(min=1.0)
        return torch.tensor(counts, dtype=torch.float32) @ (table / times)


# Weight of the newest pass in the running mean of a layer's correlation.
_NEWEST = 0.1


class RoutingStats:
    """Everything that is counted of routing, for all layers with experts: one object that a model's layers share."""

    def __init__(
        self, num_experts: Mapping[int, int], device: torch.device | str = "cpu", *, popularity_only: bool = False
    ) -> None:
        """`num_experts` by layer; the tables of `affinity` are on `device`, where routers choose.

        `popularity_only` spares what only forecasts and modes of streaming read; a summary needs no more.
        """
        self._popularity_only = popularity_only
        self.popularity = Popularity(num_experts)
        self.affinity = Affinity(num_experts, device)
        # Tokens of one text choose similar experts: the measured union divided by that of independent tokens.
        self._correlation = {layer: RunningMean(_NEWEST, 1.0) for layer in num_experts}

    @property
    def layers(self) -> list[int]:
        """The layers that have experts, in the model's order."""
        return list(self.popularity.layers)

    def num_experts(self, layer: int) -> int:
        return self.popularity.layers[layer].num_experts

    def observe(self, layer: int, groups: ExpertGroups) -> None:
        """Counts what the router of `layer` chose in a pass."""
        tokens = groups.expert_ids.shape[0]
        if self._popularity_only:
            self.popularity.observe(layer, tokens, groups.counts)
            return
        # First, because popularity must not know the pass that its prediction is compared with.
        self.observe_union(layer, tokens, len(groups.wanted))
        self.popularity.observe(layer, tokens, groups.counts)
        self.affinity.observe(layer, groups.expert_ids)

    def observe_union(self, layer: int, tokens: int, num_wanted: int) -> None:
        """Compares the experts that `tokens` tokens wanted with what independent tokens would have wanted."""
        expected = float(self.popularity.layers[layer].wanted_by(tokens).sum())
        self._correlation[layer].observe(num_wanted / expected)

    def expected_misses(self, layer: int, tokens: int, held: Collection[int]) -> float:
        """The expected number of experts that `tokens` tokens want of `layer` and that are not among `held`."""
        probabilities = self.popularity.layers[layer].wanted_by(tokens)
        independent = float(probabilities.sum() - probabilities[list(held)].sum())
        return independent * (self._correlation[layer].value or 0.0)

    def start_counting(self) -> None:
        """Passes so far do not belong to the job."""
        self.popularity.start_counting()
