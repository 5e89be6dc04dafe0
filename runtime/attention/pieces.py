"""What the new tokens of a pass see of the cache, as pieces of one block or a few, in the order of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..batch import Chunk
from .limits import PIECE_TOKENS
from .protocol import AttentionCall

Ints = npt.NDArray[np.int64]
# A stretch of the pool is multiplied as it lies where at least this part of it is wanted; else it is gathered.
DENSE = 0.75


@dataclass(frozen=True, slots=True)
class Pieces:
    """`block_ids` [N, m]: m blocks that follow each other in one sequence, the `owners`-th [N] of those that decode.

    Its token sees positions `lows` to `highs` [N] of the piece's m * block. What fills up a piece is hidden so.
    """

    block_ids: Ints
    owners: Ints
    lows: Ints
    highs: Ints

    @classmethod
    def of(cls, call: AttentionCall, tables: dict[Chunk, torch.Tensor], block: int) -> Pieces:
        """`tables` are the block tables of chunks of one token."""
        together = -(-PIECE_TOKENS // block)
        seen = [
            _of_one(call, owner, chunk, table.cpu().numpy(), (block, together))
            for owner, (chunk, table) in enumerate(tables.items())
        ]
        parts = zip(*((one.block_ids, one.owners, one.lows, one.highs) for one in seen), strict=True)
        return cls(*(np.concatenate(part) for part in parts))

    def __len__(self) -> int:
        return len(self.owners)

    def take(self, chosen: npt.NDArray[np.intp]) -> Pieces:
        return Pieces(self.block_ids[chosen], self.owners[chosen], self.lows[chosen], self.highs[chosen])

    def hidden(self, tokens: int) -> npt.NDArray[np.bool_] | None:
        """[N, tokens] of those that are not seen in pieces of as many; None where all are."""
        if not self.lows.any() and (self.highs == tokens).all():
            return None
        places = np.arange(tokens)
        return (places < self.lows[:, None]) | (places >= self.highs[:, None])


@dataclass(frozen=True, slots=True)
class Share:
    """Pieces that are multiplied in one call.

    In place: blocks `begin` to `begin + len(pieces)` of the pool; gathered: `begin` is None. Those not `wanted` [n] are
    computed in vain: in place they belong to nobody here, gathered they fill up to an even count.
    """

    pieces: Pieces
    wanted: npt.NDArray[np.bool_]
    begin: int | None


def shares(pieces: Pieces, tokens: int, num_blocks: int, most: int) -> Iterator[Share]:
    """All pieces, at most `most` together, stretches of a pool of `num_blocks` that are nearly all wanted first.

    Only pieces that are seen whole are computed in place, so that what nobody wrote is never multiplied: it may be NaN.
    """
    left = np.ones(len(pieces), dtype=np.bool_)
    if pieces.block_ids.shape[1] == 1:
        whole = np.flatnonzero((pieces.lows == 0) & (pieces.highs == tokens))
        # A block of several sequences is one of them in place, and gathered for the others.
        ids, first = np.unique(pieces.block_ids[whole, 0], return_index=True)
        stretches = ids // most
        counts = np.bincount(stretches)
        for stretch in np.flatnonzero(counts):
            begin = int(stretch) * most
            size = min(most, num_blocks - begin)
            if counts[stretch] >= DENSE * size:
                among = stretches == stretch
                chosen = whole[first[among]]
                left[chosen] = False
                yield _in_place(pieces, chosen, ids[among] - begin, (begin, size, tokens))
    rest = np.flatnonzero(left)
    rest = rest[np.argsort(pieces.block_ids[rest, 0], kind="stable")]
    for start in range(0, len(rest), most):
        chosen = rest[start : start + most]
        size = min(most, _even(len(chosen)))
        padded = np.concatenate([chosen, np.repeat(chosen[-1:], size - len(chosen))])
        yield Share(pieces.take(padded), np.arange(size) < len(chosen), None)


def _even(count: int) -> int:
    """As many or a few more: oneDNN makes a kernel for every count that it meets, and keeps it."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def _in_place(pieces: Pieces, chosen: npt.NDArray[np.intp], places: Ints, size: tuple[int, int, int]) -> Share:
    begin, count, tokens = size
    wanted = np.zeros(count, dtype=np.bool_)
    wanted[places] = True
    owners = np.zeros(count, dtype=np.int64)
    owners[places] = pieces.owners[chosen]
    ids = np.arange(begin, begin + count).reshape(-1, 1)
    return Share(Pieces(ids, owners, np.zeros_like(owners), np.full_like(owners, tokens)), wanted, begin)


def _of_one(call: AttentionCall, owner: int, chunk: Chunk, table: Ints, size: tuple[int, int]) -> Pieces:
    block, together = size
    low, high = call.first_seen(chunk.past), chunk.past + 1
    first = low // block
    ids = table[first : -(-high // block)]
    count = -(-len(ids) // together)
    # Filled up with a block that is there, unseen.
    ids = np.concatenate([ids, np.repeat(ids[:1], count * together - len(ids))])
    begins = first * block + np.arange(count) * (together * block)
    lows = np.clip(low - begins, 0, None)
    highs = np.clip(high - begins, None, together * block)
    return Pieces(ids.reshape(count, together), np.full(count, owner), lows, highs)
