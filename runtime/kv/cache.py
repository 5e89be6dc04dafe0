"""The KV cache of a model: one pool and one allocator per layer group, block tables per sequence."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from .allocator import BlockAllocator
from .pool import KVPool


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, a list per layer group, and how many of its tokens are stored."""

    blocks: list[list[int]] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a model layer's records are: its group, and its place among the group's layers."""

    group: int
    index: int


class KVCache:
    """Grows and frees block tables all-or-nothing over all layer groups."""

    def __init__(self, pools: Items[KVPool], num_blocks: int) -> None:
        self.pools = tuple(pools)
        self.num_blocks = num_blocks
        self.allocators = tuple(BlockAllocator(num_blocks) for _ in pools)
        self.places = {
            layer: LayerPlace(group, index)
            for group, pool in enumerate(pools)
            for index, layer in enumerate(pool.spec.group.layers)
        }

    @property
    def block(self) -> int:
        """Tokens per block."""
        return self.pools[0].spec.block

    @property
    def free_tokens(self) -> int:
        """Tokens that fit into blocks which nobody holds."""
        return min(allocator.num_free for allocator in self.allocators) * self.block

    @property
    def token_nbytes(self) -> float:
        return sum(pool.spec.token_nbytes for pool in self.pools)

    @property
    def nbytes(self) -> int:
        return sum(self.num_blocks * pool.spec.block_nbytes for pool in self.pools)

    @property
    def used_slots(self) -> int:
        """Token places in blocks that are held, over all groups; the denominator of waste."""
        return sum(allocator.num_used for allocator in self.allocators) * self.block

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` could ever be stored, were it alone."""
        return num_tokens <= self.num_blocks * self.block

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes room for `num_tokens` in all; False, and no change, when blocks are short."""
        if not table.blocks:
            table.blocks = [[] for _ in self.pools]
        missing = [
            pool.spec.blocks_for(num_tokens) - len(blocks)
            for pool, blocks in zip(self.pools, table.blocks, strict=True)
        ]
        if any(count > allocator.num_free for count, allocator in zip(missing, self.allocators, strict=True)):
            return False
        for count, allocator, blocks in zip(missing, self.allocators, table.blocks, strict=True):
            blocks.extend(allocator.take(max(count, 0)) or ())
        return True

    def release(self, table: BlockTable) -> None:
        """Frees every block of `table` and empties it."""
        for allocator, blocks in zip(self.allocators, table.blocks, strict=False):
            allocator.give_back(blocks)
        table.blocks, table.num_tokens = [], 0
