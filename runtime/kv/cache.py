"""The KV cache of a model over all layer groups: block tables grow, share, fork, are parked on the host and freed."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from ...offload.device import PIN_CHUNK_NBYTES, Device, HostMemory, Pinned
from .allocator import (
    NO_BLOCK,
    NO_SLOT,
    BlockAllocator,
    BlockTable,
    GroupCache,
    TokenSource,
    Usage,
    extend_chain,
    measure,
)
from .pool import BlockMemory, KVPool
from .spec import KVSpec
from .states import StatePool, StateSlots


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
        self.tiers = [_TierBlocks(BlockAllocator(len(memory)), HostSlots(memory)) for memory in slots]
        self._block = groups[0].spec.block

    def park(self, table: BlockTable) -> bool:
        """Moves stored blocks to the host; returns False, and changes nothing, where too few slots are free."""
        num_blocks = -(-table.num_tokens // self._block)
        stored = [blocks[:num_blocks] for blocks in table.blocks]
        moved = _move_all(stored, self._contents(table), self._cache, self.tiers)
        if moved is None:
            return False
        for tier, blocks in zip(self._cache, table.blocks, strict=True):
            _release(tier, blocks)
        table.parked, table.blocks = moved, []
        return True

    def unpark(self, table: BlockTable) -> bool:
        """Moves them back into the cache; returns False, and changes nothing, where too few blocks are available."""
        moved = _move_all(table.parked, self._contents(table), self.tiers, self._cache)
        if moved is None:
            return False
        for tier, slots in zip(self.tiers, table.parked, strict=True):
            _release(tier, slots)
        table.blocks, table.parked = moved, []
        return True

    def release(self, table: BlockTable) -> None:
        """What the table has parked is given up, and its blocks of host memory are free."""
        for slots, parked in zip(self.tiers, table.parked, strict=True):
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
                pinned = piece.pin(device)
                if list(pinned.pieces(0, piece.nbytes)) == [(0, piece.nbytes)] and pinned.nbytes == piece.nbytes:
                    self._pinned.append(pinned)
                else:
                    pinned.close()
            yield piece.bytes.view(-1, nbytes)


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """Where a model layer's records are: its group, and its index among the group's layers."""

    group: int
    index: int


class KVCache:
    """A paged cache with one pool of blocks per layer group; every change is all-or-nothing over all groups.

    `root` is the hash of all settings that keys and values depend on; `sharing` lets tables find each other's blocks.
    `host_slots`, by group, are host memory in which preempted sequences may be parked. With recurrent layers every
    table has one of the `states` too. A state cannot be cut, so a prefix is shared only as far as a snapshot was kept:
    where sequences that `expect` announced part, and at ends of chunks.
    """

    def __init__(
        self,
        pools: Items[KVPool],
        *,
        root: bytes = b"",
        sharing: bool = True,
        host_slots: Items[Items[torch.Tensor]] | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self.groups = tuple(GroupCache(pool) for pool in pools)
        self.host = HostTier(self.groups, host_slots) if host_slots and states is None else None
        self.sharing = sharing and (states is None or states.most_snapshots > 0)
        self.states = states
        self._slots = None if states is None else StateSlots(states, self.block)
        # By layer, for keys and values, and for the keys of indexers.
        self.layer_indices = self._indices(of_indexers=False)
        self.indexers = self._indices(of_indexers=True)
        self._root = root

    def _indices(self, *, of_indexers: bool) -> dict[int, LayerIndex]:
        return {
            layer: LayerIndex(group, index)
            for group, pool in enumerate(self.pools)
            if pool.spec.group.is_index == of_indexers
            for index, layer in enumerate(pool.spec.group.layers)
        }

    @property
    def block(self) -> int:
        """Tokens per block."""
        return self.pools[0].spec.block

    @property
    def token_nbytes(self) -> float:
        return sum(pool.spec.token_nbytes for pool in self.pools)

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` fits into the empty cache."""
        return all(group.fits(num_tokens) for group in self.groups)

    def open(
        self, table: BlockTable, tokens: TokenSource, num_tokens: int, spare: int, shareable: int | None = None
    ) -> bool:
        """Starts a sequence of `num_tokens` with its parked blocks, or with stored blocks of the same beginning, of
        which only the first `shareable` tokens are taken from other tables.

        `table.num_tokens` is then the number of tokens whose keys and values are there. Returns False, and changes
        nothing, unless the rest fits too and `spare` blocks of each group stay available.
        """
        if table.parked:
            if self.states is not None and not self.states.num_free:
                return False
            nothing: list[list[int]] = [[] for _ in self.groups]
            assert self.host is not None
            return self._admits(nothing, table.num_tokens, num_tokens, spare) and self.host.unpark(table)
        found = self._find(table, tokens, num_tokens if shareable is None else min(num_tokens, shareable + 1))
        stored = len(found[0]) * self.block
        if not self._admits(found, stored, num_tokens, spare):
            return False
        if self._slots is not None and not self._slots.open(table, table.hashes[: len(found[0])]):
            return False
        for group, blocks in zip(self.groups, found, strict=True):
            group.share(blocks)
        table.blocks = found
        table.num_tokens = table.num_grown = stored
        table.num_published = len(found[0])
        return True

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Grows the table to slots for `num_tokens` in all; False, and no change, when too few blocks are available.

        A block that other tables hold too is copied before it is written to.
        """
        if not table.blocks:
            table.blocks = [[] for _ in self.groups]
        stored = table.num_tokens
        if any(
            group.missing(blocks, num_tokens, stored) > group.allocator.num_available
            for group, blocks in zip(self.groups, table.blocks, strict=True)
        ):
            return False
        for group, blocks in zip(self.groups, table.blocks, strict=True):
            group.grow(blocks, num_tokens, stored)
        table.num_grown = max(num_tokens, table.num_grown)
        return True

    def grow_within_block(self, table: BlockTable) -> bool:
        """Grows by one token if that takes no block, as most tokens do not; else returns False and changes nothing."""
        stored = table.num_tokens
        for group, blocks in zip(self.groups, table.blocks, strict=True):
            if not group.has_slot(blocks, stored):
                return False
        table.num_grown = max(stored + 1, table.num_grown)
        return True

    def headroom(self, table: BlockTable) -> int:
        """The number of tokens that the table can grow by now."""
        return min(
            group.headroom(blocks, table.num_tokens) for group, blocks in zip(self.groups, table.blocks, strict=True)
        )

    def expect(self, table: BlockTable, tokens: TokenSource, num_tokens: int) -> None:
        """Announces a sequence that waits: a snapshot is kept where its first `num_tokens` part from others'."""
        if self._slots is not None and self.sharing:
            num_blocks = (num_tokens - 1) // self.block
            self._hash(table, tokens, num_blocks)
            self._slots.expect(table.hashes[:num_blocks])

    def publish(self, table: BlockTable, tokens: TokenSource, prompt: int = 0) -> None:
        """Lets other tables find this table's full blocks, also those that the next pass fills.

        A pass stores all its keys and values of a layer before it reads any, so that a sequence may attend to what
        another one stores in the same pass. Its states of the first `prompt` tokens are found where they are kept.
        """
        num_blocks = table.num_grown // self.block if self.sharing else 0
        if num_blocks <= table.num_published:
            return
        self._hash(table, tokens, num_blocks)
        for index in range(table.num_published, num_blocks):
            for group, blocks in zip(self.groups, table.blocks, strict=True):
                group.publish(blocks, index, table.hashes[index])
        table.num_published = num_blocks
        if self._slots is not None:
            self._slots.plan(table, prompt)

    def retract(self, table: BlockTable) -> None:
        """Nobody finds what a pass that failed was to store in this table."""
        stored = table.num_tokens // self.block
        for group, blocks in zip(self.groups, table.blocks, strict=True):
            group.retract(blocks[stored : table.num_published])
        table.num_published = min(stored, table.num_published)
        if self._slots is not None:
            self._slots.retract(table)

    def store(self, table: BlockTable, count: int) -> None:
        """Records that `count` more tokens have their keys and values stored; frees blocks behind all windows."""
        table.num_tokens += count
        if self._slots is not None:
            self._slots.settle(table)
        for group, blocks in zip(self.groups, table.blocks, strict=True):
            group.trim(blocks, table.num_tokens)

    def shrink(self, table: BlockTable) -> None:
        """Gives back what the table grew by for tokens that did not come to be stored."""
        table.num_grown = table.num_tokens
        for group, blocks in zip(self.groups, table.blocks, strict=True):
            group.shrink(blocks, table.num_tokens)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks; a shared block is copied before it is written to, a state at once."""
        for group, blocks in zip(self.groups, table.blocks, strict=True):
            group.share(blocks)
        state = NO_SLOT if self._slots is None else self._slots.fork(table)
        return BlockTable(
            [list(blocks) for blocks in table.blocks],
            table.num_tokens,
            table.num_grown,
            list(table.hashes),
            table.num_published,
            state=state,
        )

    def set_aside(self, table: BlockTable) -> bool:
        """Takes all blocks from a table; returns whether its content is parked in host memory."""
        table.num_grown = table.num_tokens
        if self.host is not None and table.num_tokens and self.host.park(table):
            return True
        self.release(table)
        return False

    def release(self, table: BlockTable) -> None:
        """Gives back every block of the table, parked ones too; the table is then as new except for its hashes."""
        if table.parked and self.host is not None:
            self.host.release(table)
        for group, blocks in zip(self.groups, table.blocks, strict=False):
            group.release(blocks)
        if self._slots is not None:
            self._slots.release(table)
        table.clear()

    def drop_parked(self, table: BlockTable) -> None:
        """Forgets the parked blocks of a table; its sequence starts from the beginning."""
        if table.parked:
            table.parked = []
            table.clear()

    def share_states(self, other: KVCache) -> None:
        """Tables take their states from those of another cache, which has the same pool of them."""
        self._slots = other._slots

    def move(self, table: BlockTable) -> bool:
        """Moves a table with its blocks to other memory, where there is room; this cache has none."""
        return False

    def takes(self, table: BlockTable, source: KVCache, spare: int) -> bool:
        """Takes the blocks of a table of another cache; False, and no change, unless `spare` blocks of each group stay
        available."""
        tiers = [[_TierBlocks(each.allocator, each.pool.memory) for each in cache.groups] for cache in (source, self)]
        if any(
            len(blocks) + spare > group.allocator.num_available
            for blocks, group in zip(table.blocks, self.groups, strict=True)
        ):
            return False
        contents = table.hashes[: table.num_tokens // self.block] if self.sharing else []
        moved = _move_all(table.blocks, contents, *tiers)
        if moved is None:
            return False
        for group, blocks in zip(source.groups, table.blocks, strict=True):
            group.release(blocks)
        table.blocks = moved
        return True

    def usage(self, tables: Iterable[BlockTable]) -> Usage:
        """What the bytes are used for while a pass runs; `tables` are all tables that hold blocks."""
        return measure(self.groups, tables)

    def _find(self, table: BlockTable, tokens: TokenSource, num_tokens: int) -> list[list[int]]:
        """Blocks with the longest beginning of the sequence that all groups still have, one list per group.

        Its last token is never included: the logits after it have to be computed.
        """
        num_blocks = (num_tokens - 1) // self.block if self.sharing else 0
        self._hash(table, tokens, num_blocks)
        hashes = table.hashes[:num_blocks]
        # A group that looks back to the first token needs all blocks: nothing behind the first that is gone is usable.
        for group in self.groups:
            if group.spec.group.window is None:
                del hashes[group.prefix(hashes) :]
        each = [group.usable(hashes) for group in self.groups]
        usable = zip(*each, *([] if self._slots is None else [self._slots.kept(hashes)]), strict=True)
        count = max(count for count, by_group in enumerate(usable) if all(by_group))
        return [group.found(hashes[:count]) for group in self.groups]

    def _hash(self, table: BlockTable, tokens: TokenSource, num_blocks: int) -> None:
        extend_chain(table.hashes, self._root, tokens, self.block, num_blocks)

    def _admits(self, found: list[list[int]], stored: int, num_tokens: int, spare: int) -> bool:
        return all(
            group.admits(blocks, stored, num_tokens, spare) for group, blocks in zip(self.groups, found, strict=True)
        )
