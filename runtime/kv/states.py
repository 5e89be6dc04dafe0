"""The states of recurrent layers: one slot of fixed size per running sequence, beside the blocks of keys and values."""

from __future__ import annotations

import torch

from ...quant.tensor import TORCH_DTYPES
from .spec import StateSpec

# The slot of a table that has none.
NO_SLOT = -1


class StatePool:
    """`num_slots` states, laid out by layer, so that a layer's states of a pass are gathered by one index.

    A slot's bytes mean nothing until a pass has written them: a sequence without stored tokens starts from zeros.
    """

    def __init__(self, spec: StateSpec, num_slots: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._conv: dict[int, torch.Tensor] = {}
        self._recurrent: dict[int, torch.Tensor] = {}
        self._memory: list[torch.Tensor] = []
        for group in spec.groups:
            if group.conv:
                conv = self._allocate(TORCH_DTYPES[spec.dtype], len(group.layers), group.conv, device)
                self._conv |= dict(zip(group.layers, conv, strict=True))
            if group.recurrent:
                states = self._allocate(torch.float32, len(group.layers), group.recurrent, device)
                self._recurrent |= dict(zip(group.layers, states, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def conv(self, layer: int) -> torch.Tensor:
        """The last inputs [slots, C, K - 1] of a layer's convolution."""
        return self._conv[layer]

    def recurrent(self, layer: int) -> torch.Tensor:
        """The states [slots, ...] of a layer's scan, in float32."""
        return self._recurrent[layer]

    def take(self) -> int:
        """A free slot. Raises IndexError where there is none: callers ask `num_free` first."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Raises ValueError for a slot that nobody has: its bytes would be used twice."""
        if slot in self._free:
            raise ValueError(f"state {slot} was given back, but nobody holds it")
        self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        for memory in self._memory:
            memory[:, target].copy_(memory[:, source])

    def _allocate(
        self, dtype: torch.dtype, layers: int, shape: tuple[int, ...], device: torch.device | str
    ) -> torch.Tensor:
        self._memory.append(torch.zeros(layers, self.num_slots, *shape, dtype=dtype, device=device))
        return self._memory[-1]
