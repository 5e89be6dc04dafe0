"""The host tier of the KV cache: parks whole blocks of preempted sequences instead of computing them again."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from ...offload.device import PIN_CHUNK_NBYTES, Device, HostMemory, Pinned
from .allocator import NO_BLOCK, BlockAllocator, BlockTable, GroupCache
from .pool import BlockMemory
from .spec import KVSpec


class HostSlots:
    """Blocks of host memory, uint8 [block_nbytes] each, with the methods of `BlockMemory` that parking uses."""

    def __init__(self, slots: Items[torch.Tensor]) -> None:
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, slot: int) -> torch.Tensor:
        return self._slots[slot]

    def put(self, slot: int, content: torch.Tensor) -> None:
        self._slots[slot][: len(content)].copy_(content, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _TierBlocks:
    """The blocks of one layer group in one tier: their allocator and their bytes, uint8 [block_nbytes] each."""

    allocator: BlockAllocator
    memory: BlockMemory | HostSlots


class HostTier:
    """`slots[g]` are blocks of memory for layer group g, uint8 [block_nbytes] each, pinned where there is a device.

    A block crosses the link in one copy, with all layers of its group. Copies run on the stream that computes: it
    writes a block before it is copied out and reads it after it was copied in, so that stream order makes them safe.
    They delay it little: a sequence's blocks cross the link in a thousandth of the time that a pass's weights take.
    """

    def __init__(self, groups: Items[GroupCache], slots: Items[Items[torch.Tensor]]) -> None:
        self._cache = [_TierBlocks(group.allocator, group.pool.memory) for group in groups]
        self._host = [_TierBlocks(BlockAllocator(len(memory)), HostSlots(memory)) for memory in slots]
        self._block = groups[0].spec.block

    @property
    def allocators(self) -> tuple[BlockAllocator, ...]:
        return tuple(tier.allocator for tier in self._host)

    def park(self, table: BlockTable) -> bool:
        """Moves stored blocks to the host; returns False, and changes nothing, where too few slots are free."""
        num_blocks = -(-table.num_tokens // self._block)
        stored = [blocks[:num_blocks] for blocks in table.blocks]
        moved = _move_all(stored, self._contents(table), self._cache, self._host)
        if moved is None:
            return False
        for tier, blocks in zip(self._cache, table.blocks, strict=True):
            _release(tier, blocks)
        table.parked, table.blocks = moved, []
        return True

    def unpark(self, table: BlockTable) -> bool:
        """Moves them back into the cache; returns False, and changes nothing, where too few blocks are available."""
        moved = _move_all(table.parked, self._contents(table), self._host, self._cache)
        if moved is None:
            return False
        for tier, slots in zip(self._host, table.parked, strict=True):
            _release(tier, slots)
        table.blocks, table.parked = moved, []
        return True

    def release(self, table: BlockTable) -> None:
        """What the table has parked is given up, and its blocks of host memory are free."""
        for slots, parked in zip(self._host, table.parked, strict=True):
            _release(slots, parked)
        table.parked = []

    def _contents(self, table: BlockTable) -> list[bytes]:
        """Hashes of the blocks that are full of stored tokens."""
        return table.hashes[: table.num_tokens // self._block]


def _move_all(
    lists: list[list[int]], contents: list[bytes], sources: list[_TierBlocks], targets: list[_TierBlocks]
) -> list[list[int]] | None:
    found = [_find(blocks, contents, target) for blocks, target in zip(lists, targets, strict=True)]
    for blocks, there, target in zip(lists, found, targets, strict=True):
        if _num_taken(blocks, there, target) > target.allocator.num_available:
            return None
    groups = zip(lists, found, sources, targets, strict=True)
    return [_move(blocks, there, contents, source, target) for blocks, there, source, target in groups]


def _find(blocks: list[int], contents: list[bytes], target: _TierBlocks) -> list[int]:
    """Blocks of the target that already hold the same content, NO_BLOCK for the others."""
    found = [NO_BLOCK] * len(blocks)
    for index, (block_id, content) in enumerate(zip(blocks, contents, strict=False)):
        there = target.allocator.find(content)
        if block_id != NO_BLOCK and there is not None:
            found[index] = there
    return found


def _num_taken(blocks: list[int], found: list[int], target: _TierBlocks) -> int:
    """The number of available blocks that the move takes: new ones, and found ones without a reference."""
    wanted = (there for block_id, there in zip(blocks, found, strict=True) if block_id != NO_BLOCK)
    return sum(1 for there in wanted if there == NO_BLOCK or not target.allocator.references(there))


def _move(
    blocks: list[int], found: list[int], contents: list[bytes], source: _TierBlocks, target: _TierBlocks
) -> list[int]:
    moved = list(found)
    # Before any block is taken: taking evicts blocks without references.
    for there in found:
        if there != NO_BLOCK:
            target.allocator.share(there)
    for index, (block_id, there) in enumerate(zip(blocks, found, strict=True)):
        if block_id == NO_BLOCK or there != NO_BLOCK:
            continue
        (moved[index],) = target.allocator.take(1)
        target.memory.put(moved[index], source.memory.get(block_id))
        if index < len(contents):
            target.allocator.publish(moved[index], contents[index])
    return moved


def _release(tier: _TierBlocks, blocks: list[int]) -> None:
    tier.allocator.release(block_id for block_id in reversed(blocks) if block_id != NO_BLOCK)


class ParkingMemory:
    """Allocates host memory for parking; `slots[g][i]` is uint8 [block_nbytes] of layer group g.

    Each allocation holds whole blocks and is page-locked as a whole or not at all: one copy may not read from two
    registrations. Memory that the machine refuses to page-lock is used too; its copies wait for the device.
    """

    def __init__(self, specs: Iterable[KVSpec], counts: Iterable[int], device: Device | None) -> None:
        self._device = device
        self._pinned: list[Pinned] = []
        self._pieces: list[HostMemory] = []
        self.slots = [
            [row for piece in self._allocate(count, spec.block_nbytes, device) for row in piece]
            for spec, count in zip(specs, counts, strict=True)
        ]

    def close(self) -> None:
        """Waits for running copies and drops the memory, which is freed with its last slot."""
        if self._device is not None and self._pinned:
            self._device.synchronize()
        while self._pinned:
            self._pinned.pop().close()
        self._pieces, self.slots = [], [[] for _ in self.slots]

    def _allocate(self, count: int, nbytes: int, device: Device | None) -> Iterable[torch.Tensor]:
        together = max(1, PIN_CHUNK_NBYTES // nbytes)
        for begin in range(0, count, together):
            piece = HostMemory(min(together, count - begin) * nbytes)
            self._pieces.append(piece)
            if device is not None:
                self._pin(piece, device)
            yield piece.bytes.view(-1, nbytes)

    def _pin(self, piece: HostMemory, device: Device) -> None:
        pinned = piece.pin(device)
        if list(pinned.pieces(0, piece.nbytes)) == [(0, piece.nbytes)] and pinned.nbytes == piece.nbytes:
            self._pinned.append(pinned)
        else:
            pinned.close()
