"""The slots of held experts: bytes in memory that compute reads, one expert's until another takes its place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

import torch

from .expert import ExpertWeights
from .policy import ExpertKey

MoveOut = Callable[[ExpertKey, ExpertKey, torch.Tensor], None]
Bind = Callable[[ExpertKey, torch.Tensor], ExpertWeights]


class ExpertSlots:
    """`slots` are uint8 bytes by the expert that lies in them; `bind` makes matrices of an expert's bytes.

    `move_out(leaving, entering, slot)` is called while `slot` still holds the one that leaves.
    """

    def __init__(self, slots: Mapping[ExpertKey, torch.Tensor], bind: Bind, move_out: MoveOut) -> None:
        self._slots = dict(slots)
        self.bind = bind
        self._move_out = move_out
        self._weights = {key: bind(key, slot) for key, slot in slots.items()}
        self._of: defaultdict[int, set[int]] = defaultdict(set)
        for layer, expert in slots:
            self._of[layer].add(expert)

    def __len__(self) -> int:
        return len(self._slots)

    def of(self, layer: int) -> AbstractSet[int]:
        """The experts of a layer that are held."""
        return self._of[layer]

    def weights(self, key: ExpertKey) -> ExpertWeights:
        return self._weights[key]

    def swap(self, leaving: ExpertKey, entering: ExpertKey, view: torch.Tensor) -> None:
        """`entering`, whose bytes are `view`, takes the slot of `leaving`, which must be of its size.

        The copy is compute like any other: what was asked of the slot before is done before it is overwritten.
        """
        slot = self._slots.pop(leaving)
        del self._weights[leaving]
        self._move_out(leaving, entering, slot)
        slot.copy_(view)
        self._of[leaving.layer].discard(leaving.expert)
        self._of[entering.layer].add(entering.expert)
        self._slots[entering] = slot
        self._weights[entering] = self.bind(entering, slot)
