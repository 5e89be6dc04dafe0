"""The blocks of one layer group: how a table's list of them grows, is shared and is trimmed."""

from __future__ import annotations

from collections.abc import Sequence as Items

from .allocator import NO_BLOCK, BlockAllocator
from .pool import KVPool


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
            self._copy_tail(blocks, stored)
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

    def _copy_tail(self, blocks: list[int], stored: int) -> None:
        """Copy-on-write: other tables keep the old block unchanged."""
        index = stored // self.spec.block
        (own,) = self.allocator.take(1)
        self.pool.memory.copy(blocks[index], own)
        self.allocator.release([blocks[index]])
        blocks[index] = own
