"""Experts of which some are held and the others arrive, pass after pass, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..offload.stream.stream import ShardStream
from .expert import ExpertWeights
from .groups import ExpertGroups

Bind = Callable[[int, torch.Tensor], ExpertWeights]


@dataclass(slots=True)
class StreamedExperts:
    """A layer's experts: `held` by id, those in `streamed` come through the stream in that order in every pass.

    Everything streamed arrives, wanted or not: with many unrelated sequences nearly every expert of a layer is wanted,
    so waiting for the router would only delay the copies. Held experts compute while the others arrive.
    """

    held: dict[int, ExpertWeights]
    streamed: range
    stream: ShardStream[torch.Tensor]
    bind: Bind

    @property
    def num_experts(self) -> int:
        return len(self.held) + len(self.streamed)

    def fetch(self, groups: ExpertGroups) -> Iterator[tuple[int, ExpertWeights]]:
        wanted = set(groups.wanted)
        for expert_id in sorted(wanted & self.held.keys()):
            yield expert_id, self.held[expert_id]
        for expert_id in self.streamed:
            arrival = self.stream.next()
            if expert_id in wanted:
                yield expert_id, self.bind(expert_id, arrival.view)
            self.stream.done(arrival)
