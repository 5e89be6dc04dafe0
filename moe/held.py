"""Experts that stay in memory for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .expert import Arrived, ExpertWeights
from .groups import ExpertGroups


@dataclass(slots=True)
class HeldExperts:
    """All experts of a layer, usable where they lie; `fetch` yields the wanted ones at once."""

    experts: list[ExpertWeights]

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    def fetch(self, groups: ExpertGroups) -> Iterator[list[Arrived]]:
        yield [(expert_id, self.experts[expert_id]) for expert_id in groups.wanted]
