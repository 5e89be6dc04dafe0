"""Plans the decode attention of a pass: tiles of the pool to multiply, and the reduction of their partial results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..engine.batch import Chunk
from ..kv.cache import KVCache
from .choice import PARTIALS_NBYTES, PIECE_TOKENS, SINGLE_THREAD_NUMEL, TILE_NUMEL
from .pass_pages import GroupSlots
from .protocol import AttentionCall, decodes

Ints = npt.NDArray[np.int64]
# A range of the pool is multiplied in place where at least this fraction of its blocks is wanted; else it is gathered.
DENSE = 0.75


@dataclass(frozen=True, slots=True)
class Pieces:
    """N pieces of the KV cache, each made of m consecutive blocks of one sequence, `block_ids` [N, m].

    `owners` [N] are indices of sequences among those that decode. The owner's token attends to positions `lows` to
    `highs` [N] of the piece's m * block; blocks that only pad a piece are masked by these bounds.
    """

    block_ids: Ints
    owners: Ints
    lows: Ints
    highs: Ints

    @classmethod
    def of(cls, call: AttentionCall, tables: dict[Chunk, torch.Tensor], block: int) -> Pieces:
        """The pieces that chunks of one token attend to; `tables` are the chunks' block tables."""
        blocks_per_piece = -(-PIECE_TOKENS // block)
        by_sequence = [
            _pieces_of(call, owner, chunk, table.cpu().numpy(), (block, blocks_per_piece))
            for owner, (chunk, table) in enumerate(tables.items())
        ]
        parts = zip(*((one.block_ids, one.owners, one.lows, one.highs) for one in by_sequence), strict=True)
        return cls(*(np.concatenate(part) for part in parts))

    def __len__(self) -> int:
        return len(self.owners)

    def take(self, chosen: npt.NDArray[np.intp]) -> Pieces:
        return Pieces(self.block_ids[chosen], self.owners[chosen], self.lows[chosen], self.highs[chosen])

    def hidden(self, tokens: int) -> npt.NDArray[np.bool_] | None:
        """Mask [N, tokens] of the positions that no token attends to; None where there are none."""
        if not self.lows.any() and (self.highs == tokens).all():
            return None
        positions = np.arange(tokens)
        return (positions < self.lows[:, None]) | (positions >= self.highs[:, None])


@dataclass(frozen=True, slots=True)
class Tile:
    """Pieces that are multiplied in one call.

    A tile is read in place, as blocks `begin` to `begin + len(pieces)` of the pool, or it is gathered, and `begin` is
    None. Results of pieces that are not `wanted` [n] are ignored: in a tile that is read in place they belong to no
    sequence that decodes, in a gathered one they pad it to an even count.
    """

    pieces: Pieces
    wanted: npt.NDArray[np.bool_]
    begin: int | None


def tiles(pieces: Pieces, tokens: int, num_blocks: int, max_pieces: int) -> Iterator[Tile]:
    """Cuts all pieces into tiles of at most `max_pieces`: first those read in place from a pool of `num_blocks`.

    Only pieces that are attended to whole are read in place, so that bytes that nobody wrote are never multiplied: they
    may be NaN.
    """
    left = np.ones(len(pieces), dtype=np.bool_)
    if pieces.block_ids.shape[1] == 1:
        whole = np.flatnonzero((pieces.lows == 0) & (pieces.highs == tokens))
        # A block that several sequences share is read in place for one of them, and gathered for the others.
        ids, first = np.unique(pieces.block_ids[whole, 0], return_index=True)
        ranges = ids // max_pieces
        counts = np.bincount(ranges)
        for index in np.flatnonzero(counts):
            begin = int(index) * max_pieces
            size = min(max_pieces, num_blocks - begin)
            if counts[index] >= DENSE * size:
                among = ranges == index
                chosen = whole[first[among]]
                left[chosen] = False
                yield _contiguous_tile(pieces, chosen, ids[among] - begin, (begin, size, tokens))
    rest = np.flatnonzero(left)
    rest = rest[np.argsort(pieces.block_ids[rest, 0], kind="stable")]
    for start in range(0, len(rest), max_pieces):
        chosen = rest[start : start + max_pieces]
        size = min(max_pieces, _even(len(chosen)))
        padded = np.concatenate([chosen, np.repeat(chosen[-1:], size - len(chosen))])
        yield Tile(pieces.take(padded), np.arange(size) < len(chosen), None)


def _even(count: int) -> int:
    """`count` or slightly more: oneDNN compiles and keeps a kernel for every count that it meets."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def _contiguous_tile(pieces: Pieces, chosen: npt.NDArray[np.intp], rows: Ints, size: tuple[int, int, int]) -> Tile:
    """The tile of blocks `begin` on, size (begin, count, tokens); `rows` of it are the `chosen` pieces."""
    begin, count, tokens = size
    wanted = np.zeros(count, dtype=np.bool_)
    wanted[rows] = True
    owners = np.zeros(count, dtype=np.int64)
    owners[rows] = pieces.owners[chosen]
    ids = np.arange(begin, begin + count).reshape(-1, 1)
    return Tile(Pieces(ids, owners, np.zeros_like(owners), np.full_like(owners, tokens)), wanted, begin)


def _pieces_of(call: AttentionCall, owner: int, chunk: Chunk, table: Ints, size: tuple[int, int]) -> Pieces:
    block, blocks_per_piece = size
    low, high = call.first_visible(chunk.past), chunk.past + 1
    first = low // block
    ids = table[first : -(-high // block)]
    count = -(-len(ids) // blocks_per_piece)
    # Padded with a block of the sequence, which `lows` and `highs` mask.
    ids = np.concatenate([ids, np.repeat(ids[:1], count * blocks_per_piece - len(ids))])
    begins = first * block + np.arange(count) * (blocks_per_piece * block)
    lows = np.clip(low - begins, 0, None)
    highs = np.clip(high - begins, None, blocks_per_piece * block)
    return Pieces(ids.reshape(count, blocks_per_piece), np.full(count, owner), lows, highs)


@dataclass(frozen=True, slots=True)
class TileTask:
    """A tile of n pieces of m blocks on the device; its results go to rows `begin` to `end` of the wave's partials.

    `block_range` is where the blocks are consecutive in the pool; else it is None and `block_ids` [n * m] gather them.
    `owners` [n] are rows of the queries. `hidden` [n, L] marks the masked positions of a piece, and `blank` indexes the
    same positions among all n * H * L; both are None where nothing is masked.
    """

    begin: int
    end: int
    block_range: slice | None
    block_ids: torch.Tensor
    owners: torch.Tensor
    hidden: torch.Tensor | None
    blank: torch.Tensor | None

    @classmethod
    def of(cls, tile: Tile, begin: int, size: tuple[int, int], device: torch.device | str) -> TileTask:
        """`size` is (L, H)."""
        tokens, kv_heads = size
        pieces = tile.pieces
        hidden = pieces.hidden(tokens)
        blank = None
        if hidden is not None:
            blank = torch.from_numpy(np.flatnonzero(np.repeat(hidden[:, None], kv_heads, 1))).to(device)
        return cls(
            begin,
            begin + len(pieces),
            None if tile.begin is None else slice(tile.begin, tile.begin + len(pieces)),
            torch.from_numpy(pieces.block_ids.reshape(-1)).to(device),
            torch.from_numpy(pieces.owners).to(device),
            None if hidden is None else torch.from_numpy(hidden).to(device),
            blank,
        )


@dataclass(frozen=True, slots=True)
class Reduction:
    """Which `rows` [N] of a wave's partials are reduced, sorted by their `owners` [N], and the bags of `embedding_bag`.

    `head_rows` [N * Hq] are row * Hq + head, those of one owner and head next to each other; `offsets` [S * Hq] are
    where each of these bags begins.
    """

    rows: torch.Tensor
    owners: torch.Tensor
    head_rows: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(
        cls, owners: np.ndarray, wanted: np.ndarray, sizes: tuple[int, int], device: torch.device | str
    ) -> Reduction:
        """`owners` and `wanted` of all rows of a wave; `sizes` is (S, Hq)."""
        num_sequences, num_heads = sizes
        rows = np.flatnonzero(wanted)
        rows = rows[np.argsort(owners[rows], kind="stable")]
        owners = owners[rows]
        counts = np.bincount(owners, minlength=num_sequences)
        begins = np.cumsum(counts) - counts
        heads = np.arange(num_heads)
        offsets = begins[:, None] * num_heads + heads * counts[:, None]
        targets = offsets[owners] + (np.arange(len(rows)) - begins[owners])[:, None]
        head_rows = np.empty(targets.size, dtype=np.int32)
        head_rows[targets] = rows[:, None] * num_heads + heads
        arrays = (rows, owners, head_rows, offsets.astype(np.int32).reshape(-1))
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True, slots=True)
class Wave:
    """Tiles whose partial results fit into the scratch together, and their reduction."""

    tasks: tuple[TileTask, ...]
    reduction: Reduction

    @property
    def num_rows(self) -> int:
        """Rows of the partials."""
        return self.tasks[-1].end


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """`rows` [S] of a pass that are single tokens, and the waves that compute them.

    `single_threaded`: the work is so small that it ends before a second thread has woken up.
    """

    rows: torch.Tensor
    waves: tuple[Wave, ...]
    single_threaded: bool


class DecodePlanCache:
    """The plans of the running pass, one per layer group: its layers share it."""

    def __init__(self, cache: KVCache, num_workers: int, item_nbytes: int, device: torch.device | str) -> None:
        self._cache = cache
        self._num_workers = num_workers
        self._item_nbytes = item_nbytes
        self._device = device
        self._plans: dict[int, tuple[GroupSlots, DecodePlan]] = {}

    def of(self, call: AttentionCall, group: int, slots: GroupSlots, num_heads: int) -> DecodePlan:
        if group not in self._plans or self._plans[group][0] is not slots:
            self._plans[group] = slots, self._make(call, group, slots, num_heads)
        return self._plans[group][1]

    def _make(self, call: AttentionCall, group: int, slots: GroupSlots, num_heads: int) -> DecodePlan:
        pool = self._cache.pools[group]
        kv_heads, dim, block = pool.spec.group.kv_heads, pool.spec.group.head_dim, pool.spec.block
        tables = {chunk: table for chunk, table in slots.tables.items() if decodes(call, chunk)}
        pieces = Pieces.of(call, tables, block)
        tokens = pieces.block_ids.shape[1] * block
        single_threaded = len(pieces) * kv_heads * tokens * dim <= SINGLE_THREAD_NUMEL
        max_pieces = max(1, TILE_NUMEL // max(kv_heads * tokens * dim, num_heads * max(4 * tokens, dim)))
        max_pieces = _power(max_pieces if single_threaded else min(max_pieces, len(pieces) // self._num_workers))
        max_rows = max(max_pieces, PARTIALS_NBYTES // (num_heads * dim * self._item_nbytes))
        sizes = (len(tables), num_heads)
        rows = torch.tensor([chunk.begin for chunk in tables], device=self._device)
        waves = [
            self._wave(part, (tokens, kv_heads), sizes)
            for part in _runs(tiles(pieces, tokens, len(pool.memory), max_pieces), max_rows)
        ]
        return DecodePlan(rows, tuple(waves), single_threaded)

    def _wave(self, part: list[Tile], size: tuple[int, int], sizes: tuple[int, int]) -> Wave:
        tasks: list[TileTask] = []
        for tile in part:
            tasks.append(TileTask.of(tile, tasks[-1].end if tasks else 0, size, self._device))
        owners = np.concatenate([tile.pieces.owners for tile in part])
        wanted = np.concatenate([tile.wanted for tile in part])
        return Wave(tuple(tasks), Reduction.of(owners, wanted, sizes, self._device))


def _power(count: int) -> int:
    """The largest power of two up to `count`: tiles have few different sizes, since oneDNN keeps a kernel for each."""
    return 1 << (max(1, count).bit_length() - 1)


def _runs(tiles: Iterable[Tile], max_rows: int) -> Iterator[list[Tile]]:
    """Runs of tiles with at most `max_rows` pieces together; a tile with more is a run of its own."""
    run: list[Tile] = []
    count = 0
    for tile in tiles:
        if run and count + len(tile.pieces) > max_rows:
            yield run
            run, count = [], 0
        run.append(tile)
        count += len(tile.pieces)
    if run:
        yield run
