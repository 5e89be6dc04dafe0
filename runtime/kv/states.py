"""The states of recurrent layers: one slot of fixed size per running sequence, beside the blocks of keys and values.

Slots beyond those of running sequences hold snapshots: states at the end of a prefix, found by the hash of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...quant.tensor import TORCH_DTYPES
from .allocator import BlockAllocator
from .spec import StateSpec

# The slot of a table that has none.
NO_SLOT = -1
# Where the states of slots are: one slot, several that follow one another, or int64 numbers on the pool's device.
Slots = int | slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerStates:
    """What one function of a layer keeps, [slots, ...]: `codes` in the pool's format, of which `[slots]` reads numbers.

    int8 codes have a scale for each last dimension, [slots, ..., 1], so that the largest of its numbers has code 127.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    decoded: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.codes.dtype

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot's numbers, as they are read."""
        return self.codes[0].numel() * self.decoded.itemsize

    def __getitem__(self, slots: Slots) -> torch.Tensor:
        """The numbers of slots; those of a slice are the pool's own memory, unless their format is another one."""
        values = _taken(self.codes, slots).to(self.decoded)
        return values if self.scales is None else values.mul_(_taken(self.scales, slots))

    def __setitem__(self, slots: Slots, values: torch.Tensor | float) -> None:
        if self.scales is not None:
            values = torch.as_tensor(values).to(self.scales).expand(_taken(self.codes, slots).shape)
            scales = values.abs().amax(-1, keepdim=True) / 127
            _put(self.scales, slots, scales)
            values = (values / scales.clamp(min=torch.finfo(scales.dtype).tiny)).round_()
        _put(self.codes, slots, values)

    def holds(self, values: torch.Tensor) -> bool:
        """Whether a change of `values`, which were read, has changed the states."""
        return values.untyped_storage().data_ptr() == self.codes.untyped_storage().data_ptr()


def _taken(memory: torch.Tensor, slots: Slots) -> torch.Tensor:
    if not isinstance(slots, torch.Tensor):
        return memory[slots]
    if memory.is_contiguous():
        return memory.index_select(0, slots)
    # Whole slots are copied one after the other only where their memory is in order.
    return memory.mT.index_select(0, slots).mT


def _put(memory: torch.Tensor, slots: Slots, values: torch.Tensor | float) -> None:
    if not isinstance(slots, torch.Tensor):
        memory[slots] = values
        return
    values = torch.as_tensor(values).to(memory.dtype)
    if memory.is_contiguous() or values.dim() < 2:
        memory.index_copy_(0, slots, values)
    else:
        memory.mT.index_copy_(0, slots, values.mT)


class StatePool:
    """`num_slots` states, laid out by layer, so that a layer's states of a pass are gathered by one index.

    A slot's bytes mean nothing until a pass has written them: a sequence without stored tokens starts from zeros.
    `most_running` slots are for sequences; a pass takes at most as many snapshots as there are others, and keeps them
    as long as no sequence needs their slots. A state can be kept at positions that are multiples of `cut`.
    """

    def __init__(
        self,
        spec: StateSpec,
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        most_running: int | None = None,
        cut: int = 1,
    ) -> None:
        self.spec = spec
        self.num_slots = num_slots
        self.most_snapshots = 0 if most_running is None else num_slots - most_running
        self.cut = cut
        # States of slots that follow one another are changed where they are, those of others are gathered.
        self.allocator = BlockAllocator(num_slots, lowest_first=True)
        self._conv: dict[int, LayerStates] = {}
        self._recurrent: dict[int, LayerStates] = {}
        self._memory: list[torch.Tensor] = []
        for group in spec.groups:
            layers, dtype = len(group.layers), TORCH_DTYPES[spec.dtype]
            if group.conv:
                # The channels of one input lie together: a step over all of them then needs no strides.
                conv = self._allocate(dtype, layers, group.conv[::-1], device).transpose(-1, -2)
                self._conv |= {layer: LayerStates(conv[i], None, dtype) for i, layer in enumerate(group.layers)}
            if group.recurrent:
                codes = self._allocate(_CODES[spec.format], layers, group.recurrent, device)
                scales = None
                if spec.format == "int8":
                    scales = self._allocate(torch.float32, layers, (*group.recurrent[:-1], 1), device)
                for i, layer in enumerate(group.layers):
                    self._recurrent[layer] = LayerStates(codes[i], None if scales is None else scales[i])

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    @property
    def num_free(self) -> int:
        """Slots that a sequence can take; those of snapshots are among them."""
        return self.allocator.num_available

    @property
    def num_snapshots(self) -> int:
        """Snapshots that prefixes can be found by, and that no sequence reads now."""
        return self.allocator.num_cached

    def conv(self, layer: int) -> LayerStates:
        """The last inputs [slots, C, K - 1] of a layer's convolution; in memory C is the last dimension."""
        return self._conv[layer]

    def recurrent(self, layer: int) -> LayerStates:
        """The states [slots, ...] of a layer's scan, which are float32 when they are read."""
        return self._recurrent[layer]

    def take(self) -> int:
        """A slot. Raises ValueError where there is none: callers ask `num_free` first."""
        (slot,) = self.allocator.take(1)
        return slot

    def give_back(self, slot: int) -> None:
        """Raises ValueError for a slot that nobody has: its bytes would be used twice."""
        if not self.allocator.references(slot):
            raise ValueError(f"state {slot} was given back, but nobody holds it")
        self.allocator.release([slot])

    def copy(self, source: int, target: int) -> None:
        for memory in self._memory:
            memory[:, target].copy_(memory[:, source])

    def _allocate(
        self, dtype: torch.dtype, layers: int, shape: tuple[int, ...], device: torch.device | str
    ) -> torch.Tensor:
        self._memory.append(torch.zeros(layers, self.num_slots, *shape, dtype=dtype, device=device))
        return self._memory[-1]


_CODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
