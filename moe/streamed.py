"""Experts of which some are held and the others arrive, pass after pass, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..offload.stream.stream import ShardStream
from .expert import Arrived, ExpertWeights
from .groups import ExpertGroups

Bind = Callable[[int, torch.Tensor], ExpertWeights]

# Experts that are computed side by side when compute is what the stream waits for; their places are not read into
# meanwhile, so this stays a small part of a ring.
MAX_TOGETHER = 4


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

    def fetch(self, groups: ExpertGroups) -> Iterator[list[Arrived]]:
        wanted = set(groups.wanted)
        yield [(expert_id, self.held[expert_id]) for expert_id in sorted(wanted & self.held.keys())]
        coming = iter(self.streamed)
        for first in coming:
            together = [(first, self.stream.next())]
            while len(together) < MAX_TOGETHER and together[-1][0] + 1 in self.streamed and self.stream.is_ready():
                together.append((next(coming), self.stream.next()))
            yield [(expert_id, self.bind(expert_id, one.view)) for expert_id, one in together if expert_id in wanted]
            for _, arrival in together:
                self.stream.done(arrival)
