"""Experts that stay in memory for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .expert import ExpertWeights
from .groups import ExpertGroups


@dataclass(slots=True)
class HeldExperts:
    """All experts of a layer, usable where they lie; `fetch` yields the wanted ones, ascending."""

    experts: list[ExpertWeights]

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    def fetch(self, groups: ExpertGroups) -> Iterator[tuple[int, ExpertWeights]]:
        for expert_id in groups.wanted:
            yield expert_id, self.experts[expert_id]
