"""Statistics of routing: how often experts are chosen, and how many of them, with how many rows, a pass wants together.

They only observe; caches and summaries read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

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
    def probabilities(self) -> npt.NDArray[np.float64]:
        """The probability that a token chooses each expert [E]; uniform before the first observation."""
        # One more token, spread evenly over all experts, keeps experts that were never chosen above zero.
        per_token = self.chosen.sum() / self.tokens if self.tokens else 1.0
        return (self.chosen + per_token / len(self.chosen)) / (self.tokens + 1.0)

    def wanted_by(self, tokens: float) -> npt.NDArray[np.float64]:
        """The probability that at least one of `tokens` independent tokens chooses each expert [E]."""
        wanted: npt.NDArray[np.float64] = 1.0 - (1.0 - np.minimum(self.probabilities, 1.0)) ** tokens
        return wanted


# Weight of the newest pass in the running mean of a layer's correlation.
_NEWEST = 0.1


class RoutingStats:
    """Everything that is counted of routing, for all layers with experts: one object that a model's layers share."""

    def __init__(self, num_experts: Mapping[int, int]) -> None:
        """`num_experts` is by layer."""
        self._layers = {layer: LayerPopularity(np.zeros(count)) for layer, count in num_experts.items()}
        self._later: dict[int, torch.Tensor] = {}
        # Tokens of one text choose similar experts: the measured union divided by that of independent tokens.
        self._correlation = {layer: RunningMean(_NEWEST, 1.0) for layer in num_experts}

    @property
    def layers(self) -> Mapping[int, LayerPopularity]:
        """The counts of a layer, by the model's layer index, in the model's order; waits for a device that counts."""
        for layer, totals in self._later.items():
            chosen, wanted = totals.cpu().numpy()
            stats = self._layers[layer]
            stats.chosen += chosen[:-1]
            stats.tokens += chosen[-1]
            stats.unions += int(wanted[:-1].sum())
            stats.passes += int(wanted[-1])
            totals.zero_()
        return self._layers

    def num_experts(self, layer: int) -> int:
        """The experts of a layer; waits for nothing."""
        return self._layers[layer].num_experts

    def count_later(self, layer: int, totals: torch.Tensor) -> None:
        """A device counts a layer in `totals` int64 [2, E + 1]: the tokens, and the passes, that chose each expert, and
        all of them.
        """
        self._later[layer] = totals

    def count(self, layer: int, tokens: int, counts: Sequence[int]) -> None:
        """Adds one layer of a pass: its number of tokens, and the number of tokens that chose each expert [E]."""
        stats, chosen = self._layers[layer], np.asarray(counts)
        stats.chosen += chosen
        stats.tokens += tokens
        stats.unions += int(np.count_nonzero(chosen))
        stats.passes += 1

    def observe(self, layer: int, tokens: int, counts: Sequence[int]) -> None:
        """Adds one layer of a pass, as `count`, and compares its union with what was expected of it."""
        # First, because the counts must not have the pass that their prediction is compared with.
        self.observe_union(layer, tokens, len(counts) - counts.count(0))
        self.count(layer, tokens, counts)

    def observe_union(self, layer: int, tokens: int, num_wanted: int) -> None:
        """Compares the experts that `tokens` tokens wanted with what independent tokens would have wanted."""
        expected = float(self._layers[layer].wanted_by(tokens).sum())
        self._correlation[layer].observe(num_wanted / expected)

    def expected_misses(self, layer: int, tokens: int, held: Collection[int]) -> float:
        """The expected number of experts that `tokens` tokens want of `layer` and that are not among `held`."""
        probabilities = self._layers[layer].wanted_by(tokens)
        independent = float(probabilities.sum() - probabilities[list(held)].sum())
        return independent * (self._correlation[layer].value or 0.0)

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
