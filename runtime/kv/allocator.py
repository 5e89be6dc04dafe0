"""Allocates the blocks of a layer group, the tables that list them, and what they are used for. Knows no bytes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from heapq import heappop, heappush

from .pool import KVPool

# An entry of a block table: the layer no longer looks back this far, and its block was given back.
NO_BLOCK = -1


class BlockAllocator:
    """A block is live (referenced), cached (unreferenced, its content findable by its hash) or free.

    Which block is taken next depends on earlier calls alone: free blocks first, the last freed before others, then
    cached blocks, the first released before others. Every operation takes O(1) per block. `lowest_first` takes the
    free block with the lowest number instead, in O(log n), so that those in use follow one another.
    """

    def __init__(self, num_blocks: int, lowest_first: bool = False) -> None:
        self.num_blocks = num_blocks
        self._lowest_first = lowest_first
        # Minus `num_live`, this is the number of blocks that sharing saves.
        self.num_references = 0
        self._references = [0] * num_blocks
        # A heap is in ascending order where the lowest comes first.
        self._free = list(range(num_blocks)) if lowest_first else list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of blocks that `take` can return."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        return self.num_blocks - self.num_available

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def take(self, count: int) -> list[int]:
        """Takes `count` unreferenced blocks and references each once.

        Raises ValueError, and takes nothing, when fewer are available: callers count first, because a change is
        all-or-nothing over several groups.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks were wanted and {self.num_available} are available")
        return [self._take() for _ in range(count)]

    def share(self, block_id: int) -> None:
        """Adds a reference to a live or cached block."""
        self._cached.pop(block_id, None)
        self._references[block_id] += 1
        self.num_references += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops a reference to each block. Raises ValueError where there is none: its bytes would be used twice."""
        for block_id in block_ids:
            if self._references[block_id] < 1:
                raise ValueError(f"block {block_id} was given back, but nobody holds it")
            self._references[block_id] -= 1
            self.num_references -= 1
            if self._references[block_id] == 0:
                if block_id in self._hash_of:
                    self._cached[block_id] = None
                elif self._lowest_first:
                    heappush(self._free, block_id)
                else:
                    self._free.append(block_id)

    def publish(self, block_id: int, content: bytes) -> None:
        """Makes a live block findable by the hash of its content; of two blocks with the same content, the first is."""
        if self._hash_of.get(block_id, content) != content:
            raise ValueError(f"block {block_id} was published with other content before")
        if content not in self._block_of:
            self._block_of[content] = block_id
            self._hash_of[block_id] = content

    def forget(self, block_id: int) -> None:
        """Nobody finds this live block any more: its content never came to be."""
        content = self._hash_of.pop(block_id, None)
        if content is not None:
            del self._block_of[content]

    def find(self, content: bytes) -> int | None:
        """A live or cached block with this content, None where there is none."""
        return self._block_of.get(content)

    def _take(self) -> int:
        if self._free:
            block_id = heappop(self._free) if self._lowest_first else self._free.pop()
        else:
            block_id = next(iter(self._cached))
            del self._cached[block_id]
            del self._block_of[self._hash_of.pop(block_id)]
        self._references[block_id] = 1
        self.num_references += 1
        return block_id


HASH_NBYTES = 16

# The token ids of a sequence at positions begin to end.
TokenSource = Callable[[int, int], list[int]]


def root_hash(*settings: object) -> bytes:
    """The hash before the first block, of everything that keys and values depend on: model, formats, precision."""
    return blake2b(repr(settings).encode(), digest_size=HASH_NBYTES, person=b"moedge.kv").digest()


def extend_chain(hashes: list[bytes], root: bytes, tokens: TokenSource, block: int, num_blocks: int) -> None:
    """Appends the hashes of full blocks to `hashes` until there are `num_blocks`."""
    for index in range(len(hashes), num_blocks):
        ids = array("q", tokens(index * block, (index + 1) * block))
        before = hashes[-1] if hashes else root
        hashes.append(blake2b(before + ids.tobytes(), digest_size=HASH_NBYTES).digest())


class GroupCache:
    """One pool and its allocator. Methods work on `blocks`, the group's list in a block table."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.spec = pool.spec
        self.allocator = BlockAllocator(len(pool.memory))
        self.block_nbytes = pool.spec.block_nbytes
        self.scale_fraction = pool.spec.scale_fraction

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` fits into the empty group; with a window, only what it reaches counts."""
        return self.spec.least_blocks(num_tokens) <= self.allocator.num_blocks

    def missing(self, blocks: list[int], num_tokens: int, stored: int) -> int:
        """The number of blocks that growing to `num_tokens` takes, including a copy of a shared last block."""
        return max(0, self.spec.blocks_for(num_tokens) - len(blocks)) + self._shares_tail(blocks, stored)

    def grow(self, blocks: list[int], num_tokens: int, stored: int) -> None:
        """Adds slots for tokens `stored` to `num_tokens`; the caller has checked that enough blocks are available."""
        if self._shares_tail(blocks, stored):
            # Copy-on-write: other tables keep the old block unchanged.
            index = stored // self.spec.block
            (own,) = self.allocator.take(1)
            self.pool.memory.copy(blocks[index], own)
            self.allocator.release([blocks[index]])
            blocks[index] = own
        blocks += self.allocator.take(max(0, self.spec.blocks_for(num_tokens) - len(blocks)))

    def has_slot(self, blocks: list[int], stored: int) -> bool:
        """Whether the next token's slot is in a block that has been begun and that no other table holds."""
        index, offset = divmod(stored, self.spec.block)
        return offset > 0 and index < len(blocks) and self.allocator.references(blocks[index]) == 1

    def headroom(self, blocks: list[int], stored: int) -> int:
        """The number of tokens beyond `stored` that the list can grow by now."""
        spare = self.allocator.num_available - self._shares_tail(blocks, stored)
        return (len(blocks) + spare) * self.spec.block - stored if spare >= 0 else 0

    def trim(self, blocks: list[int], num_tokens: int) -> None:
        """Gives back the blocks that no token from position `num_tokens` on attends to."""
        last = index = min(self.spec.first_block(num_tokens), len(blocks))
        while index > 0 and blocks[index - 1] != NO_BLOCK:
            index -= 1
        self.allocator.release(blocks[index:last])
        blocks[index:last] = [NO_BLOCK] * (last - index)

    def shrink(self, blocks: list[int], num_tokens: int) -> None:
        """Gives back the blocks behind those of `num_tokens`."""
        count = self.spec.blocks_for(num_tokens)
        self.release(blocks[count:])
        del blocks[count:]

    def release(self, blocks: list[int]) -> None:
        """Gives back blocks, the last first: cached beginnings, which other sequences may share, are evicted last."""
        self.allocator.release(block_id for block_id in reversed(blocks) if block_id != NO_BLOCK)

    def share(self, blocks: list[int]) -> None:
        for block_id in blocks:
            if block_id != NO_BLOCK:
                self.allocator.share(block_id)

    def prefix(self, hashes: Items[bytes]) -> int:
        """The number of blocks with these contents that can be found, up to the first that cannot."""
        return next(
            (count for count, content in enumerate(hashes) if self.allocator.find(content) is None), len(hashes)
        )

    def usable(self, hashes: Items[bytes]) -> list[bool]:
        """For k = 0 to len(hashes): whether all blocks that a token after k blocks attends to can be found."""
        usable, run = [True], 0
        for count, content in enumerate(hashes, 1):
            run = run + 1 if self.allocator.find(content) is not None else 0
            usable.append(run >= count - self.spec.first_block(count * self.spec.block))
        return usable

    def found(self, hashes: Items[bytes]) -> list[int]:
        """The list of blocks with these contents, NO_BLOCK behind the window; `usable` confirmed that they exist."""
        first = self.spec.first_block(len(hashes) * self.spec.block)
        blocks = [self.allocator.find(content) for content in hashes[first:]]
        return [NO_BLOCK] * first + [NO_BLOCK if block_id is None else block_id for block_id in blocks]

    def admits(self, found: list[int], stored: int, num_tokens: int, spare: int) -> bool:
        """Whether a sequence with `stored` tokens in blocks `found` can start while `spare` blocks stay available.

        It needs blocks for all its tokens and the next one: with fewer it would soon be preempted. With a window its
        blocks are given back while it is computed, and blocks for one more token are enough.
        """
        wanted = num_tokens if self.spec.group.window is None else stored
        taken = self.spec.blocks_for(wanted + 1) - self.spec.first_block(stored)
        held = sum(1 for block_id in found if block_id != NO_BLOCK and self.allocator.references(block_id))
        return taken - held <= self.allocator.num_available - spare

    def publish(self, blocks: list[int], index: int, content: bytes) -> None:
        if blocks[index] != NO_BLOCK:
            self.allocator.publish(blocks[index], content)

    def retract(self, blocks: Items[int]) -> None:
        for block_id in blocks:
            if block_id != NO_BLOCK:
                self.allocator.forget(block_id)

    def _shares_tail(self, blocks: list[int], stored: int) -> bool:
        """Whether the block of the next token already holds tokens and other tables hold it too."""
        return stored % self.spec.block > 0 and self.allocator.references(blocks[stored // self.spec.block]) > 1


NO_SLOT = -1


@dataclass(slots=True)
class BlockTable:
    """A list of blocks per layer group: entry i holds tokens from i * block on; NO_BLOCK where it was given back.

    `num_tokens` are stored and `num_grown` have slots: the pass stores the difference. `hashes` are those of the full
    blocks, as far as they were needed; others can find `num_published` of these blocks. `parked` are blocks of the host
    tier; a table has either those or `blocks`. `state` is its slot in the pool of states, if there is one; until its
    first pass is over its state is the snapshot in `origin`, where its tokens were found. `snapshots` are positions
    that the next pass reaches, and the slots in which it keeps the states there. `cohort` says whose blocks they are:
    0 those of the tier that computes, others of host memory.
    """

    blocks: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    num_grown: int = 0
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    parked: list[list[int]] = field(default_factory=list)
    state: int = NO_SLOT
    origin: int = NO_SLOT
    cohort: int = 0
    snapshots: list[tuple[int, int]] = field(default_factory=list)

    def clear(self) -> None:
        """Forgets the blocks; the hashes stay valid, because the sequence's tokens do not change."""
        self.blocks = []
        self.num_tokens = self.num_grown = self.num_published = 0


@dataclass(slots=True)
class Usage:
    """Bytes by use: the first four add up to the allocation. Usages of several passes can be added.

    `live` holds tokens. `waste` are slots of live blocks without a token, or with one that no later token attends to.
    `cached` blocks belong to no table and can still be found; `idle` blocks hold nothing. `scales` is the part of
    `live` that is scales and zeros. `shared` is what tables would hold beyond `live` and `waste` if they shared no
    block.
    """

    live: int = 0
    waste: int = 0
    cached: int = 0
    idle: int = 0
    scales: int = 0
    shared: int = 0

    @property
    def allocated(self) -> int:
        return self.live + self.waste + self.cached + self.idle

    def add(self, other: Usage) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def measure(groups: Iterable[GroupCache], tables: Iterable[BlockTable]) -> Usage:
    """The usage while a pass runs, whose tokens count as stored; `tables` are all tables that hold blocks."""
    usage, tables = Usage(), list(tables)
    for index, group in enumerate(groups):
        allocator, nbytes = group.allocator, group.block_nbytes
        waste = _empty_slots(group, index, tables) * nbytes // group.spec.block
        live = allocator.num_live * nbytes - waste
        usage.add(
            Usage(
                live=live,
                waste=waste,
                cached=allocator.num_cached * nbytes,
                idle=allocator.num_free * nbytes,
                scales=round(live * group.scale_fraction),
                shared=(allocator.num_references - allocator.num_live) * nbytes,
            )
        )
    return usage


def _empty_slots(group: GroupCache, index: int, tables: list[BlockTable]) -> int:
    """Slots that count as waste: unfilled ones in a table's last block, and those behind the window in its first."""
    block, unfilled, behind = group.spec.block, dict[int, int](), dict[int, list[int]]()
    for table in tables:
        if not table.blocks or not (blocks := table.blocks[index]):
            continue
        unfilled[blocks[-1]] = len(blocks) * block - table.num_grown
        first = group.spec.first_block(table.num_tokens)
        if first < len(blocks) and (slots := group.spec.group.first_visible(table.num_tokens) - first * block):
            behind.setdefault(blocks[first], []).append(slots)
    # A block that another table holds too, farther from the edge of its window, is needed whole.
    unreachable = sum(
        min(slots) for block_id, slots in behind.items() if len(slots) == group.allocator.references(block_id)
    )
    return sum(unfilled.values()) + unreachable
