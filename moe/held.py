"""Experts that stay in memory for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .affinity import Affinity
from .expert import Arrived, ExpertWeights
from .groups import ExpertGroups
from .popularity import Popularity


@dataclass(slots=True)
class HeldExperts:
    """All experts of a layer, usable where they lie; `fetch` yields the wanted ones at once."""

    layer: int
    experts: list[ExpertWeights]
    popularity: Popularity
    affinity: Affinity

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor) -> Iterator[list[Arrived]]:
        self.popularity.saw(self.layer, len(groups.expert_ids), groups.counts)
        self.affinity.saw(self.layer, groups.expert_ids)
        yield [Arrived(expert_id, self.experts[expert_id]) for expert_id in groups.wanted]
