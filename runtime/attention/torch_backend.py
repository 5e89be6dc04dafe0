"""Attention with torch alone, sequence by sequence: for CPUs, and the fallback everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...offload.machine.hardware import crew_size
from ...quant.matmul.thread_pool import WorkerPool
from ..engine.batch import Batch, Chunk
from ..kv.allocator import NO_BLOCK
from ..kv.cache import KVCache, LayerPlace
from ..kv.pool import KVPool
from ..shape.model_shape import KVGroup
from .decode import Decoder, Query, Stored
from .decode_plan import Decoding, Decodings
from .dense import attend_fresh, attend_rows, visibility
from .pass_pages import PassPlaces
from .protocol import AttentionCall, Store, check_reach, sees_itself_only

# Query rows of one masked call: bounds its scores to ROWS * heads * length elements.
ROWS = 256
# Rows and keys of a deterministic call start at multiples of these, whatever chunk they came in.
TILE_ROWS = 16
TILE_KEYS = 64


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer in a pass: q [T, Hq, D] as it meets stored keys, `shift` [T, Hq], scaled, what scores lack."""

    call: AttentionCall
    pool: KVPool
    index: int
    q: torch.Tensor
    shift: torch.Tensor | None

    @classmethod
    def of(cls, call: AttentionCall, pool: KVPool, index: int, q: torch.Tensor) -> _Layer:
        shift = None
        if pool.frame is not None and not call.is_plain:
            shift = pool.frame.shifts(index, q).mul_(call.scale)
        return cls(call, pool, index, pool.queries(q), shift)


class TorchAttention:
    """New tokens are computed over the codes of the whole pool, in its order; a chunk of a prompt over keys and values
    as they are stored, gathered into a scratch that only grows.

    `tiled` computes query rows in tiles aligned to their position in the sequence, over keys padded to a multiple of
    TILE_KEYS: a token's result then has the same bits in whichever chunk, batch or block size it was computed.
    """

    def __init__(
        self,
        cache: KVCache,
        dtype: torch.dtype,
        tiled: bool,
        device: torch.device | str = "cpu",
        store: Store | None = None,
    ) -> None:
        """`store` writes keys and values into the pool, where it is not torch that does."""
        self.cache = cache
        self._store = store
        self.tiled = tiled
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        self._places = PassPlaces(cache, device)
        # On a GPU one thread keeps the device busy; deterministic rows all go through prompts' path.
        self._crew = WorkerPool(1 if tiled or torch.device(device).type != "cpu" else crew_size())
        self._decodings = Decodings(cache, self._crew.size, dtype.itemsize, device)
        self._decoder = Decoder(self._crew, dtype, device)

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        place = self.cache.places[call.layer]
        pool, places = self.cache.pools[place.group], self._places.of(batch, place.group)
        check_reach(call, pool.spec.group)
        if self._store is None:
            pool.write(place.index, places.block_ids, places.offsets, k, v)
        else:
            self._store(pool, place.index, places.slots, k, v)
        out = torch.empty_like(q)
        for chunk in batch.chunks:
            rows = slice(chunk.begin, chunk.end)
            if not self.tiled and sees_itself_only(call, chunk):
                stored = pool.as_stored(place.index, k[rows], v[rows])
                out[rows] = attend_fresh(call, pool.queries(q[rows]), *stored)
            elif self.tiled or chunk.count > 1:
                self.attend_past(call, place, chunk, q[rows], out[rows])
        if not self.tiled and any(chunk.count == 1 for chunk in batch.chunks):
            self._decode(
                _Layer.of(call, pool, place.index, q), self._decodings.of(call, place.group, places, q.shape[1]), out
            )
        return out

    def attend_past(
        self, call: AttentionCall, place: LayerPlace, chunk: Chunk, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Fills out [n, Hq, D] for the n rows q of one chunk, whose keys and values are stored already."""
        layer = _Layer.of(call, self.cache.pools[place.group], place.index, q)
        blocks = chunk.sequence.table.blocks[place.group]
        for begin, end in _row_tiles(chunk, self.tiled):
            # Positions are of the sequence; rows of the tile that the chunk does not have are computed as zeros.
            first = max(begin, chunk.past)
            last = min(end, chunk.past + chunk.count)
            rows = slice(first - chunk.past, last - chunk.past)
            before, after = (first - begin, end - last) if self.tiled else (0, 0)
            tile = F.pad(layer.q[rows], (0, 0, 0, 0, before, after))
            shift = None if layer.shift is None else F.pad(layer.shift[rows], (0, 0, before, after))
            low, high = _key_range(call, begin, end, self.tiled)
            keys, values = self._gather(layer, blocks, low, high, last)
            mask = visibility(call, range(begin, end), range(low, high), keys)
            result = attend_rows(call, tile, keys, values, mask, shift)
            out[rows] = result[before : before + last - first]

    def _decode(self, layer: _Layer, plan: Decoding, out: torch.Tensor) -> None:
        """The chunks of one row."""
        planes = zip(layer.pool.planes(layer.index), layer.pool.formats, strict=True)
        keys, values = (Stored(*side) for side in planes)
        shift = None if layer.shift is None else layer.shift[plan.rows]
        query = Query(layer.call, layer.q[plan.rows], shift)
        out[plan.rows] = self._decoder.decode(query, keys, values, plan).to(out.dtype)

    def _gather(
        self, layer: _Layer, blocks: list[int], low: int, high: int, stored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H, high - low, D] of positions low to high; zeros in blocks given back and from `stored` on.

        Zeros, not what lies there: a slot's last owner may have left NaN, and 0 * NaN is NaN.
        """
        pool, block = layer.pool, self.cache.block
        begin, end = low // block, pool.spec.blocks_for(min(stored, high))
        if gone := blocks[begin:end].count(NO_BLOCK):
            begin += gone
        behind = max(0, begin * block - low)
        scratch = self._take((end - begin) * block, pool.spec.group)
        pool.gather(layer.index, torch.tensor(blocks[begin:end], device=scratch.device), scratch)
        seen = scratch[:, :, low + behind - begin * block : min(stored, high) - begin * block]
        if (missing := high - low - behind - seen.shape[2]) > 0 or behind:
            seen = F.pad(seen, (0, 0, behind, missing))
        return seen[0], seen[1]

    def _take(self, length: int, group: KVGroup) -> torch.Tensor:
        numel = 2 * group.kv_heads * length * group.head_dim
        if self._scratch.numel() < numel:
            self._scratch = self._scratch.new_empty(numel)
        return self._scratch[:numel].view(2, group.kv_heads, length, group.head_dim)


def _row_tiles(chunk: Chunk, aligned: bool) -> Iterator[tuple[int, int]]:
    """Runs of positions that cover the chunk: aligned to TILE_ROWS, or as long as ROWS allows."""
    last = chunk.past + chunk.count
    if aligned:
        for begin in range(chunk.past // TILE_ROWS * TILE_ROWS, last, TILE_ROWS):
            yield begin, begin + TILE_ROWS
    else:
        for begin in range(chunk.past, last, ROWS):
            yield begin, min(begin + ROWS, last)


def _key_range(call: AttentionCall, begin: int, end: int, tiled: bool) -> tuple[int, int]:
    """First and last + 1 key position that rows begin to end can see."""
    low = call.first_visible(begin)
    if not tiled:
        return low, end
    return low // TILE_KEYS * TILE_KEYS, -(-end // TILE_KEYS) * TILE_KEYS
