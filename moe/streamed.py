"""A layer's experts where not all of them are held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .expert import Arrived
from .groups import ExpertGroups
from .supply import ExpertSupply


@dataclass(slots=True)
class StreamedExperts:
    """What the model's one supply has for this layer."""

    layer: int
    num_experts: int
    supply: ExpertSupply

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[Arrived]]:
        return self.supply.fetch(self.layer, groups, hidden)
