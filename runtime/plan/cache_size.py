"""How many KV blocks each layer group needs for a number of live sequences. Closed form, torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..kv.spec import BLOCK_TOKENS, KVSpec


def largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` for which `holds`, which is true up to some number; 1 where none is."""
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# From the fewest to the most tokens a block: large ones are moved and gathered better, small ones waste less.
BLOCKS = (4, 8, 16, BLOCK_TOKENS)
MOST_WASTE = 0.03


def choose_block(mean_tokens: float) -> int:
    """Tokens per block, for sequences of `mean_tokens` in the mean over their lives.

    The last block of a sequence has (block - 1) / 2 empty places in the mean.
    """
    fitting = [block for block in BLOCKS if (block - 1) / 2 <= MOST_WASTE * (mean_tokens + (block - 1) / 2)]
    return max(fitting, default=min(BLOCKS))


@dataclass(frozen=True, slots=True)
class CacheSize:
    """A cache whose sequences may each grow to `longest` tokens, in passes of `tokens_per_pass`.

    Groups differ: layers with a window need the window of every sequence and the tokens of one pass, however long the
    texts are.
    """

    specs: tuple[KVSpec, ...]
    longest: int
    tokens_per_pass: int

    def blocks(self, num_sequences: int) -> tuple[int, ...]:
        """Blocks by group with which no one of `num_sequences` ever waits for another."""
        return tuple(self._blocks(spec, num_sequences) for spec in self.specs)

    def nbytes(self, num_sequences: int) -> int:
        return self.nbytes_of(self.blocks(num_sequences))

    def nbytes_of(self, blocks: tuple[int, ...]) -> int:
        """Of so many blocks by group."""
        return sum(count * spec.block_nbytes for count, spec in zip(blocks, self.specs, strict=True))

    def parked(self, blocks: tuple[int, ...], room: int) -> tuple[int, ...]:
        """Blocks by group that preempted sequences may wait in: as many as the cache has, or `room` bytes of them."""
        nbytes = self.nbytes_of(blocks)
        return tuple(min(count, count * room // nbytes) for count in blocks)

    def sequences_in(self, room: int, most: int) -> int:
        """The most sequences, up to `most`, whose blocks take at most `room` bytes; at least 1."""
        return largest(most, lambda count: self.nbytes(count) <= room)

    def _blocks(self, spec: KVSpec, num_sequences: int) -> int:
        whole = num_sequences * spec.blocks_for(self.longest)
        if spec.group.window is None:
            return whole
        passing = spec.blocks_for(self.tokens_per_pass)
        return min(whole, num_sequences * spec.least_blocks(self.longest) + passing)
