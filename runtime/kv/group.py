"""The blocks of one layer group: what a table's list of them takes to grow, to be shared, and to be left behind."""

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
        self.scale_share = pool.spec.scale_share

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` could be stored, were it alone: behind a window, only what it sees."""
        return self.spec.least_blocks(num_tokens) <= self.allocator.num_blocks

    def missing(self, blocks: list[int], num_tokens: int, stored: int) -> int:
        """Blocks that growing to `num_tokens` takes, a copy of a shared last one included."""
        return max(0, self.spec.blocks_for(num_tokens) - len(blocks)) + self._shares_tail(blocks, stored)

    def grow(self, blocks: list[int], num_tokens: int, stored: int) -> None:
        """Adds room for tokens `stored` to `num_tokens`; the caller knows that enough blocks are available."""
        if self._shares_tail(blocks, stored):
            self._copy_tail(blocks, stored)
        blocks += self.allocator.take(max(0, self.spec.blocks_for(num_tokens) - len(blocks)))

    def has_place(self, blocks: list[int], stored: int) -> bool:
        """Whether the next token has its place in a block that is begun and nobody else's."""
        place, begun = divmod(stored, self.spec.block)
        return begun > 0 and place < len(blocks) and self.allocator.references(blocks[place]) == 1

    def room(self, blocks: list[int], stored: int) -> int:
        """How many tokens more than `stored` could be grown to now."""
        spare = self.allocator.num_available - self._shares_tail(blocks, stored)
        return (len(blocks) + spare) * self.spec.block - stored if spare >= 0 else 0

    def trim(self, blocks: list[int], num_tokens: int) -> None:
        """Gives back the blocks that no token from position `num_tokens` on looks back to."""
        last = index = min(self.spec.first_block(num_tokens), len(blocks))
        while index > 0 and blocks[index - 1] != NO_BLOCK:
            index -= 1
        self.allocator.release(blocks[index:last])
        blocks[index:last] = [NO_BLOCK] * (last - index)

    def release(self, blocks: list[int]) -> None:
        """Last block first: where blocks are cached, the beginning of a text is what others share, and goes last."""
        self.allocator.release(block_id for block_id in reversed(blocks) if block_id != NO_BLOCK)

    def share(self, blocks: list[int]) -> None:
        for block_id in blocks:
            if block_id != NO_BLOCK:
                self.allocator.share(block_id)

    def usable(self, hashes: Items[bytes]) -> list[bool]:
        """For k = 0 to len(hashes): whether all that a token after k blocks looks back to can be found."""
        usable, run = [True], 0
        for count, content in enumerate(hashes, 1):
            run = run + 1 if self.allocator.find(content) is not None else 0
            usable.append(run >= count - self.spec.first_block(count * self.spec.block))
        return usable

    def found(self, hashes: Items[bytes]) -> list[int]:
        """The list of blocks with these contents, NO_BLOCK behind the window; `usable` said that they are there."""
        first = self.spec.first_block(len(hashes) * self.spec.block)
        blocks = [self.allocator.find(content) for content in hashes[first:]]
        return [NO_BLOCK] * first + [NO_BLOCK if block_id is None else block_id for block_id in blocks]

    def admits(self, found: list[int], stored: int, num_tokens: int, spare: int) -> bool:
        """Whether a sequence can be started, `stored` tokens of it in `found`, so that `spare` blocks stay available.

        Room for all its tokens and the next one: admitting less would only preempt it soon. Behind a window blocks
        come back while it is computed, so that room for one more token is enough.
        """
        wanted = num_tokens if self.spec.group.window is None else stored
        taken = self.spec.blocks_for(wanted + 1) - self.spec.first_block(stored)
        held = sum(1 for block_id in found if block_id != NO_BLOCK and self.allocator.references(block_id))
        return taken - held <= self.allocator.num_available - spare

    def publish(self, blocks: list[int], index: int, content: bytes) -> None:
        if blocks[index] != NO_BLOCK:
            self.allocator.publish(blocks[index], content)

    def _shares_tail(self, blocks: list[int], stored: int) -> bool:
        """Whether the block that the next token goes to holds tokens already, and somebody else's too."""
        return stored % self.spec.block > 0 and self.allocator.references(blocks[stored // self.spec.block]) > 1

    def _copy_tail(self, blocks: list[int], stored: int) -> None:
        """Copy-on-write: others keep the old block as it is."""
        index = stored // self.spec.block
        (own,) = self.allocator.take(1)
        self.pool.memory.copy(blocks[index], own)
        self.allocator.release([blocks[index]])
        blocks[index] = own
