"""The states of recurrent layers: one slot of fixed size per running sequence, and snapshots of them for block tables.

Slots beyond those of running sequences hold snapshots: states at the end of a prefix, found by the hash of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...quant.tensor import TORCH_DTYPES
from .allocator import NO_SLOT, BlockAllocator, BlockTable
from .spec import StateSpec

# The slot of a table that has none.

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


# Hashes of blocks that are remembered to find where sequences part: those of a million tokens, in 4 MiB.
_MOST_HASHES = 1 << 15


class StateSlots:
    """Gives tables their slots of a pool. A sequence that begins with a prefix reads the snapshot's slot in its first
    pass and writes its own, so that no state is copied, and the snapshot may be of the same pass.

    Snapshots are kept at ends of blocks of `block` tokens: where sequences that were announced part, which evicts
    the least recently used ones; and at ends of chunks of prompts that go on, where a slot is free.
    """

    def __init__(self, pool: StatePool, block: int) -> None:
        self.pool = pool
        self._allocator = pool.allocator
        # States can be kept at multiples of this number of tokens, and of blocks.
        self._step = math.lcm(block, pool.cut)
        self._blocks = self._step // block
        self._num_planned = 0
        self._known: dict[bytes, None] = {}
        self._partings: dict[bytes, None] = {}

    def expect(self, hashes: list[bytes]) -> None:
        """Announces a sequence by the hashes of its prompt's blocks."""
        common = 0
        while common < len(hashes) and hashes[common] in self._known:
            common += 1
        common -= common % self._blocks
        if common:
            _remember(self._partings, hashes[common - 1 : common])
        _remember(self._known, hashes)

    def kept(self, hashes: list[bytes]) -> list[bool]:
        """For k = 0 to len(hashes): whether a sequence can go on after k blocks."""
        return [True, *(self._allocator.find(content) is not None for content in hashes)]

    def open(self, table: BlockTable, hashes: list[bytes]) -> bool:
        """Gives the table of a sequence a slot, and the snapshot after blocks with these hashes, which `kept` found.

        Returns False, and changes nothing, where no slot is left.
        """
        origin = self._allocator.find(hashes[-1]) if hashes else None
        pinned = origin is not None and not self._allocator.references(origin)
        if self._allocator.num_available < 1 + pinned:
            return False
        if origin is not None:
            self._allocator.share(origin)
            table.origin = origin
        table.state = self.pool.take()
        return True

    def plan(self, table: BlockTable, prompt: int) -> None:
        """Chooses the snapshots of the next pass of a table, of the states of the first `prompt` tokens."""
        end = min(prompt, table.num_grown) // self._step * self._step
        for position in range(table.num_tokens // self._step * self._step + self._step, end + 1, self._step):
            content = table.hashes[position // self._step * self._blocks - 1]
            if self._allocator.find(content) is not None:
                continue
            parts = content in self._partings
            goes_on = position == end and table.num_grown < prompt and self._allocator.num_free
            if (parts or goes_on) and self._num_planned < self.pool.most_snapshots and self.pool.num_free:
                slot = self.pool.take()
                self._allocator.publish(slot, content)
                table.snapshots.append((position, slot))
                self._num_planned += 1

    def settle(self, table: BlockTable) -> None:
        """A pass of the table is over: its snapshots belong to nobody now, and it has a state of its own."""
        if table.origin != NO_SLOT:
            self.pool.give_back(table.origin)
            table.origin = NO_SLOT
        for _, slot in table.snapshots:
            self.pool.give_back(slot)
        self._num_planned -= len(table.snapshots)
        table.snapshots.clear()

    def retract(self, table: BlockTable) -> None:
        """The pass failed: nobody finds its snapshots."""
        for _, slot in table.snapshots:
            self._allocator.forget(slot)

    def fork(self, table: BlockTable) -> int:
        """A slot with a copy of the table's state."""
        slot = self.pool.take()
        self.pool.copy(table.state, slot)
        return slot

    def release(self, table: BlockTable) -> None:
        self.settle(table)
        if table.state != NO_SLOT:
            self.pool.give_back(table.state)
            table.state = NO_SLOT


def _remember(known: dict[bytes, None], hashes: Iterable[bytes]) -> None:
    """Adds hashes, as the newest; the oldest are forgotten beyond the limit."""
    for content in hashes:
        known.pop(content, None)
        known[content] = None
    while len(known) > _MOST_HASHES:
        del known[next(iter(known))]
