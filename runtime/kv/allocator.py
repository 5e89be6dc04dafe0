"""Allocates the blocks of a layer group: which are in use, how often, and what the others hold. Knows no bytes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from heapq import heappop, heappush

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
                self._retire(block_id)

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

    def _retire(self, block_id: int) -> None:
        if block_id in self._hash_of:
            self._cached[block_id] = None
        elif self._lowest_first:
            heappush(self._free, block_id)
        else:
            self._free.append(block_id)


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
