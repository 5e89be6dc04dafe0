"""The next layer's router, asked before its layer has its input: hidden states change little from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


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
