"""Block tables, and what the bytes of the cache are used for at one moment. A shared block counts once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .group import GroupCache
from .states import NO_SLOT


@dataclass(slots=True)
class BlockTable:
    """A list of blocks per layer group: entry i holds tokens from i * block on; NO_BLOCK where it was given back.

    `num_tokens` are stored and `num_grown` have slots: the pass stores the difference. `hashes` are those of the full
    blocks, as far as they were needed; others can find `num_published` of these blocks. `parked` are blocks of the host
    tier; a table has either those or `blocks`. `state` is its slot in the pool of states, if there is one; until its
    first pass is over its state is the snapshot in `origin`, where its tokens were found. `snapshots` are positions
    that the next pass reaches, and the slots in which it keeps the states there.
    """

    blocks: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    num_grown: int = 0
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    parked: list[list[int]] = field(default_factory=list)
    state: int = NO_SLOT
    origin: int = NO_SLOT
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
        self.live += other.live
        self.waste += other.waste
        self.cached += other.cached
        self.idle += other.idle
        self.scales += other.scales
        self.shared += other.shared


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
