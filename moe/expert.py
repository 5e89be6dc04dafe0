"""What one expert computes, and where its matrices come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ..quant.linear import Compute
from ..quant.tensor import PackedTensor
from .groups import ExpertGroups, combine, group_by_expert


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's matrices: up ([gate;] up, fused where the family has both) [N, D] and down [D, I]."""

    up: PackedTensor
    down: PackedTensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertBody:
    """What a family's experts do around their two matrices: activation (gate included) and an optional last norm."""

    activate: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor, weights: ExpertWeights, compute: Compute) -> torch.Tensor:
        """hidden [n, D] -> [n, D]."""
        inner = self.activate(compute.linear(hidden, weights.up, weights.up_bias))
        out = compute.linear(inner, weights.down, weights.down_bias)
        return out if self.norm is None else self.norm(out)


class ExpertSource(Protocol):
    """Where a layer's experts come from."""

    @property
    def num_experts(self) -> int: ...

    def fetch(self, groups: ExpertGroups) -> Iterator[tuple[int, ExpertWeights]]:
        """Yields the wanted experts as they become usable, each usable only until the next is asked for."""
        ...


def mix_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertSource,
    body: ExpertBody,
    compute: Compute,
) -> torch.Tensor:
    """The routed sum of experts: hidden [T, D], expert_ids and weights [T, A] -> [T, D]."""
    groups = group_by_expert(expert_ids, experts.num_experts)
    gathered = hidden[groups.token_ids]
    for expert_id, expert in experts.fetch(groups):
        rows = groups.rows(expert_id)
        # In place: an expert's inputs are read by nobody else, and its outputs are as wide.
        gathered[rows] = body.forward(gathered[rows], expert, compute)
    return combine(gathered, groups, weights)
