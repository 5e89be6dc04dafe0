"""What the cache's bytes are used for at one moment. A shared block counts once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .group import GroupCache


@dataclass(slots=True)
class BlockTable:
    """A list of blocks per layer group: entry i holds tokens i * block and on; NO_BLOCK where it was given back.

    `num_tokens` are stored, `num_grown` have room: the difference is what the pass stores. `hashes` are those of the
    full blocks as far as anybody asked, of which `num_published` can be found by others. `parked` are blocks of the
    host tier; a table has either those or `blocks`.
    """

    blocks: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0
    num_grown: int = 0
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    parked: list[list[int]] = field(default_factory=list)

    def clear(self) -> None:
        """Forgets the blocks; the hashes stay, because the sequence's tokens do."""
        self.blocks = []
        self.num_tokens = self.num_grown = self.num_published = 0


@dataclass(slots=True)
class Usage:
    """Bytes: the first four add up to the allocation. Usages of several passes can be added.

    `scales` is the part of `live` that is scales and zeros.
    `waste` are places in live blocks that hold no token, or one that no later token looks back to. `cached` blocks
    belong to nobody and can still be found, `idle` ones hold nothing. `shared` is what tables would hold beside
    `live` and `waste` if they shared no block.
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
    """While a pass runs, its tokens counted as stored; `tables` are all that hold blocks."""
    usage, tables = Usage(), list(tables)
    for index, group in enumerate(groups):
        allocator, nbytes = group.allocator, group.block_nbytes
        waste = _empty_places(group, index, tables) * nbytes // group.spec.block
        live = allocator.num_live * nbytes - waste
        usage.add(
            Usage(
                live=live,
                waste=waste,
                cached=allocator.num_cached * nbytes,
                idle=allocator.num_free * nbytes,
                scales=round(live * group.scale_share),
                shared=(allocator.num_references - allocator.num_live) * nbytes,
            )
        )
    return usage


def _empty_places(group: GroupCache, index: int, tables: list[BlockTable]) -> int:
    """Only the last block of a table can have empty places, only the first one places behind its window."""
    block, unfilled, behind = group.spec.block, dict[int, int](), dict[int, list[int]]()
    for table in tables:
        if not table.blocks or not (blocks := table.blocks[index]):
            continue
        unfilled[blocks[-1]] = len(blocks) * block - table.num_grown
        first = group.spec.first_block(table.num_tokens)
        if first < len(blocks) and (places := group.spec.group.first_visible(table.num_tokens) - first * block):
            behind.setdefault(blocks[first], []).append(places)
    # A block that somebody else holds too, further from its window's edge, is needed whole.
    unseen = sum(
        min(places) for block_id, places in behind.items() if len(places) == group.allocator.references(block_id)
    )
    return sum(unfilled.values()) + unseen
