"""The slots of held experts: memory that compute reads, which belongs to one expert until another one evicts it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Protocol

import torch

from ..offload.stream.lane import ShardKey
from .expert import ExpertWeights
from .policy import HoldPolicy

Bind = Callable[[ShardKey, torch.Tensor], ExpertWeights]


class SlotMemory(Protocol):
    """Memory that knows which expert is in which slot; slots hold uint8 bytes."""

    def shard(self, key: ShardKey) -> torch.Tensor:
        """The slot of a held expert."""
        ...

    def swap(self, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> torch.Tensor:
        """Copies `entering`, whose bytes are `view`, into the slot of `leaving`, and returns that slot."""
        ...


class ExpertSlots:
    """The weights of the experts that are held in slots of `memory`, and the policy that swaps them.

    `bind` makes an expert's matrices from its bytes. `held` lists the experts that are held at first.
    """

    def __init__(self, held: Iterable[ShardKey], memory: SlotMemory, bind: Bind, policy: HoldPolicy) -> None:
        self._memory = memory
        self.bind = bind
        self._policy = policy
        self._weights: defaultdict[int, dict[int, ExpertWeights]] = defaultdict(dict)
        for key in held:
            self._weights[key.layer][key.expert] = bind(key, memory.shard(key))

    def held(self, layer: int) -> AbstractSet[int]:
        """The experts of a layer that are held now; the set follows later swaps."""
        return self._weights[layer].keys()

    def weights(self, layer: int, expert: int) -> ExpertWeights:
        """The weights of an expert that is held."""
        return self._weights[layer][expert]

    def begin_pass(self) -> None:
        self._policy.begin_pass()

    def observe(self, layer: int, wanted: list[int]) -> None:
        """A layer wants these experts, held or not."""
        self._policy.observe(layer, wanted)

    def offer(self, entering: ShardKey, view: torch.Tensor, may_leave: Callable[[ShardKey], bool]) -> bool:
        """Lets `entering`, whose bytes are `view`, evict an expert that `may_leave`. Returns whether it did."""
        leaving = self._policy.victim(entering, may_leave)
        if leaving is not None:
            self.swap(leaving, entering, view)
        return leaving is not None

    def swap(self, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> None:
        """`entering`, whose bytes are `view`, takes the slot of `leaving`, which must have the same size.

        The copy is ordered like any other compute: work that reads the slot finishes before it is overwritten.
        """
        del self._weights[leaving.layer][leaving.expert]
        slot = self._memory.swap(leaving, entering, view)
        self._weights[entering.layer][entering.expert] = self.bind(entering, slot)
