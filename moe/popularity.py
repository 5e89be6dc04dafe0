"""How often a run's tokens chose each expert, and how many a pass wanted. Observes, never steers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class LayerPopularity:
    """`chosen` [E]: how many tokens chose each expert. `unions` adds up, over passes, how many experts were wanted."""

    chosen: npt.NDArray[np.float64]
    tokens: float = 0.0
    unions: int = 0
    passes: int = 0

    @property
    def num_experts(self) -> int:
        return len(self.chosen)

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """How often a token chooses each expert [E]; as if alike before any was seen."""
        # One token more, spread evenly: what was not seen yet is not impossible.
        per_token = self.chosen.sum() / self.tokens if self.tokens else 1.0
        return (self.chosen + per_token / len(self.chosen)) / (self.tokens + 1.0)

    def wanted_by(self, tokens: float) -> npt.NDArray[np.float64]:
        """The probability, for each expert [E], that some of `tokens` tokens want it."""
        share: npt.NDArray[np.float64] = 1.0 - (1.0 - np.minimum(self.shares, 1.0)) ** tokens
        return share


class Popularity:
    """Of every layer with experts: `layers` by the model's own index."""

    def __init__(self, num_experts: Mapping[int, int]) -> None:
        self.layers = {layer: LayerPopularity(np.zeros(count)) for layer, count in num_experts.items()}

    def saw(self, layer: int, tokens: int, counts: Sequence[int]) -> None:
        """A layer of a pass: its tokens, and how many of them chose each expert [E]."""
        seen, chosen = self.layers[layer], np.asarray(counts)
        seen.chosen += chosen
        seen.tokens += tokens
        seen.unions += int(np.count_nonzero(chosen))
        seen.passes += 1

    def start_counting(self) -> None:
        """Passes so far do not belong to the job."""
        for seen in self.layers.values():
            seen.unions = seen.passes = 0

    @property
    def unions(self) -> list[float]:
        """Share of its experts that a pass wanted, by layer, mean over passes."""
        layers = self.layers.values()
        return [seen.unions / (seen.passes * seen.num_experts) if seen.passes else 0.0 for seen in layers]

    @property
    def union(self) -> float | None:
        """Share of a layer's experts that a pass wanted, mean over layers and passes; None before any."""
        visits = sum(seen.passes * len(seen.chosen) for seen in self.layers.values())
        return sum(seen.unions for seen in self.layers.values()) / visits if visits else None
