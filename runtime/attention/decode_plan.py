"""A pass's decode attention as a plan: jobs over the pool, and how what they find is summed up by sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..engine.batch import Chunk
from ..kv.cache import KVCache
from .choice import JOB_NUMEL, LITTLE_NUMEL, PARTS_NBYTES, PIECE_TOKENS
from .pass_pages import GroupPlaces
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
    low, high = call.first_visible(chunk.past), chunk.past + 1
    first = low // block
    ids = table[first : -(-high // block)]
    count = -(-len(ids) // together)
    # Filled up with a block that is there, unseen.
    ids = np.concatenate([ids, np.repeat(ids[:1], count * together - len(ids))])
    begins = first * block + np.arange(count) * (together * block)
    lows = np.clip(low - begins, 0, None)
    highs = np.clip(high - begins, None, together * block)
    return Pieces(ids.reshape(count, together), np.full(count, owner), lows, highs)


@dataclass(frozen=True, slots=True)
class Job:
    """n pieces of m blocks, multiplied together; their results go to places `begin` to `end` of a sweep.

    `stretch` is where they lie in the pool side by side, else `block_ids` [n * m] gathers them. `owners` [n] are rows
    of the queries. `hidden` [n, L] marks what is not seen of a piece's L positions, `blank` the same positions among
    all n * H * L; both None where all is seen.
    """

    begin: int
    end: int
    stretch: slice | None
    block_ids: torch.Tensor
    owners: torch.Tensor
    hidden: torch.Tensor | None
    blank: torch.Tensor | None

    @classmethod
    def of(cls, share: Share, begin: int, size: tuple[int, int], device: torch.device | str) -> Job:
        """`size` is (L, H)."""
        tokens, kv_heads = size
        pieces = share.pieces
        hidden = pieces.hidden(tokens)
        blank = None
        if hidden is not None:
            blank = torch.from_numpy(np.flatnonzero(np.repeat(hidden[:, None], kv_heads, 1))).to(device)
        return cls(
            begin,
            begin + len(pieces),
            None if share.begin is None else slice(share.begin, share.begin + len(pieces)),
            torch.from_numpy(pieces.block_ids.reshape(-1)).to(device),
            torch.from_numpy(pieces.owners).to(device),
            None if hidden is None else torch.from_numpy(hidden).to(device),
            blank,
        )


@dataclass(frozen=True, slots=True)
class Sums:
    """Which places [N] count, by owner, with Hq query heads each: `owners` [N], and the bags that `embedding_bag` sums.

    `lanes` [N * Hq] are rows place * Hq + head, those of one owner and head side by side; `bounds` [S * Hq] their
    beginnings.
    """

    places: torch.Tensor
    owners: torch.Tensor
    lanes: torch.Tensor
    bounds: torch.Tensor

    @classmethod
    def of(cls, owners: np.ndarray, wanted: np.ndarray, sizes: tuple[int, int], device: torch.device | str) -> Sums:
        """`owners`, `wanted` of all places of a sweep; `sizes` is (S, Hq)."""
        num_sequences, num_heads = sizes
        places = np.flatnonzero(wanted)
        places = places[np.argsort(owners[places], kind="stable")]
        owners = owners[places]
        counts = np.bincount(owners, minlength=num_sequences)
        begins = np.cumsum(counts) - counts
        heads = np.arange(num_heads)
        bounds = begins[:, None] * num_heads + heads * counts[:, None]
        targets = bounds[owners] + (np.arange(len(places)) - begins[owners])[:, None]
        lanes = np.empty(targets.size, dtype=np.int32)
        lanes[targets] = places[:, None] * num_heads + heads
        arrays = (places, owners, lanes, bounds.astype(np.int32).reshape(-1))
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Jobs whose results fit into the scratch together."""

    jobs: tuple[Job, ...]
    sums: Sums

    @property
    def count(self) -> int:
        return self.jobs[-1].end


@dataclass(frozen=True, slots=True)
class Decoding:
    """Rows [S] of a pass that are single tokens, and the sweeps that compute them.

    `little` work is done before a second thread has woken up.
    """

    rows: torch.Tensor
    sweeps: tuple[Sweep, ...]
    little: bool


class Decodings:
    """The plans of the pass that is running, by layer group: the same for all layers of a group."""

    def __init__(self, cache: KVCache, sharers: int, item_nbytes: int, device: torch.device | str) -> None:
        self._cache = cache
        self._sharers = sharers
        self._item_nbytes = item_nbytes
        self._device = device
        self._found: dict[int, tuple[GroupPlaces, Decoding]] = {}

    def of(self, call: AttentionCall, group: int, places: GroupPlaces, num_heads: int) -> Decoding:
        if group not in self._found or self._found[group][0] is not places:
            self._found[group] = places, self._make(call, group, places, num_heads)
        return self._found[group][1]

    def _make(self, call: AttentionCall, group: int, places: GroupPlaces, num_heads: int) -> Decoding:
        pool = self._cache.pools[group]
        kv_heads, dim, block = pool.spec.group.kv_heads, pool.spec.group.head_dim, pool.spec.block
        tables = {chunk: table for chunk, table in places.tables.items() if chunk.count == 1}
        pieces = Pieces.of(call, tables, block)
        tokens = pieces.block_ids.shape[1] * block
        little = len(pieces) * kv_heads * tokens * dim <= LITTLE_NUMEL
        most = max(1, JOB_NUMEL // max(kv_heads * tokens * dim, num_heads * max(4 * tokens, dim)))
        most = _power(most if little else min(most, len(pieces) // self._sharers))
        together = max(most, PARTS_NBYTES // (num_heads * dim * self._item_nbytes))
        sizes = (len(tables), num_heads)
        rows = torch.tensor([chunk.begin for chunk in tables], device=self._device)
        sweeps = [
            self._sweep(part, (tokens, kv_heads), sizes)
            for part in _parts(shares(pieces, tokens, len(pool.memory), most), together)
        ]
        return Decoding(rows, tuple(sweeps), little)

    def _sweep(self, part: list[Share], size: tuple[int, int], sizes: tuple[int, int]) -> Sweep:
        jobs: list[Job] = []
        for share in part:
            jobs.append(Job.of(share, jobs[-1].end if jobs else 0, size, self._device))
        owners = np.concatenate([share.pieces.owners for share in part])
        wanted = np.concatenate([share.wanted for share in part])
        return Sweep(tuple(jobs), Sums.of(owners, wanted, sizes, self._device))


def _power(count: int) -> int:
    """The power of two below: jobs of few different sizes, as oneDNN keeps a kernel for each."""
    return 1 << (max(1, count).bit_length() - 1)


def _parts(found: Iterable[Share], most: int) -> Iterator[list[Share]]:
    """Runs of shares with at most `most` pieces, or a single one."""
    part: list[Share] = []
    count = 0
    for share in found:
        if part and count + len(share.pieces) > most:
            yield part
            part, count = [], 0
        part.append(share)
        count += len(share.pieces)
    if part:
        yield part
