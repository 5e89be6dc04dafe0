"""Which experts follow which: a token's choices in one layer against its choices in the layer before. Observes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

# Tokens of a pass that are counted, and bytes of all tables together: enough to tell, little enough not to be felt.
MAX_TOKENS = 64
MAX_NBYTES = 32 << 20


class Affinity:
    """`follows` by layer: float32 [experts before, E], how often a token that chose i before chose j there.

    `num_experts` are those of the layers that have any, in the model's order. Where their tables would take more than
    MAX_NBYTES there are none.
    """

    def __init__(self, num_experts: Mapping[int, int], device: torch.device | str = "cpu") -> None:
        shapes = self.shapes(num_experts)
        self.follows = {layer: torch.zeros(shape, device=device) for layer, shape in shapes.items()}
        self._before: torch.Tensor | None = None

    @staticmethod
    def shapes(num_experts: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Of the tables, by layer."""
        shapes = {layer: (num_experts[before], num_experts[layer]) for before, layer in pairwise(num_experts)}
        fits = sum(4 * before * count for before, count in shapes.values()) <= MAX_NBYTES
        return shapes if fits else {}

    def saw(self, layer: int, expert_ids: torch.Tensor) -> None:
        """A layer's choices [T, A]; those of the layer before, if there is one, were seen last."""
        step = -(-len(expert_ids) // MAX_TOKENS)
        chosen, before, self._before = expert_ids[::step], self._before, expert_ids[::step]
        table = self.follows.get(layer)
        if table is None or before is None or len(before) != len(chosen):
            return
        pairs = (before.unsqueeze(2) * table.shape[1] + chosen.unsqueeze(1)).reshape(-1)
        table.view(-1).index_add_(0, pairs, torch.ones(len(pairs), device=table.device))

    def expected(self, layer: int, counts: Sequence[int], per_token: int) -> torch.Tensor | None:
        """How many tokens will choose each expert of `layer` [E], if `counts` [E before] chose those before.

        In units that serve to compare experts; None where nothing is known.
        """
        table = self.follows.get(layer)
        if table is None:
            return None
        table = table.cpu()
        times = (table.sum(1, keepdim=True) / per_token).clamp_(min=1.0)
        return torch.tensor(counts, dtype=torch.float32) @ (table / times)
