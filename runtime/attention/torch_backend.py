"""Attention with torch alone, sequence by sequence: for CPUs, and the fallback everywhere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..batch import Batch, Chunk
from ..kv.allocator import NO_BLOCK
from ..kv.cache import KVCache, LayerPlace
from ..shape.model_shape import KVGroup
from .kernel import attend_fresh, attend_rows
from .protocol import AttentionCall, check_reach

# Query rows of one masked call: bounds its scores to ROWS * heads * length elements.
ROWS = 256
# Rows and keys of a deterministic call start at multiples of these, whatever chunk they came in.
TILE_ROWS = 16
TILE_KEYS = 64


class TorchAttention:
    """Gathers a sequence's blocks into a scratch that only grows, and runs SDPA on it.

    `tiled` computes query rows in tiles aligned to their position in the sequence, over keys padded to a multiple of
    TILE_KEYS: a token's result then has the same bits in whichever chunk, batch or block size it was computed.
    """

    def __init__(self, cache: KVCache, dtype: torch.dtype, tiled: bool, device: torch.device | str = "cpu") -> None:
        self.cache = cache
        self.tiled = tiled
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        self._placed: Batch | None = None
        self._places_of: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        place = self.cache.places[call.layer]
        pool = self.cache.pools[place.group]
        check_reach(call, pool.spec.group)
        block_ids, offsets = self._places(batch, place.group)
        pool.write(place.index, block_ids, offsets, k, v)
        out = torch.empty_like(q)
        for chunk in batch.chunks:
            rows = slice(chunk.begin, chunk.end)
            if self._is_fresh(call, chunk):
                out[rows] = attend_fresh(call, q[rows], *pool.as_stored(k[rows], v[rows]))
            else:
                self._attend_past(call, place, chunk, q[rows], out[rows])
        return out

    def _is_fresh(self, call: AttentionCall, chunk: Chunk) -> bool:
        reaches_all = all(reach is None or chunk.count <= reach for reach in (call.window, call.chunk))
        plain = call.softcap is None and call.sinks is None
        return chunk.past == 0 and chunk.count > 1 and reaches_all and plain and not self.tiled

    def _attend_past(
        self, call: AttentionCall, place: LayerPlace, chunk: Chunk, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        for begin, end in _row_tiles(chunk, self.tiled):
            # Positions are of the sequence; rows of the tile that the chunk does not have are computed as zeros.
            first = max(begin, chunk.past)
            last = min(end, chunk.past + chunk.count)
            tile = q[first - chunk.past : last - chunk.past]
            if self.tiled:
                padded = q.new_zeros(TILE_ROWS, *q.shape[1:])
                padded[first - begin : last - begin] = tile
                tile = padded
            low, high = _key_range(call, begin, end, self.tiled)
            keys, values = self._gather(place, chunk, low, high, last)
            result = attend_rows(call, tile, keys, values, _mask(call, range(begin, end), range(low, high), q))
            if self.tiled:
                result = result[first - begin : last - begin]
            out[first - chunk.past : last - chunk.past] = result

    def _gather(
        self, place: LayerPlace, chunk: Chunk, low: int, high: int, stored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H, high - low, D] of positions low to high; zeros in blocks given back and from `stored` on.

        Zeros, not what lies there: a slot's last owner may have left NaN, and 0 * NaN is NaN.
        """
        pool, block = self.cache.pools[place.group], self.cache.block
        begin, end = low // block, pool.spec.blocks_for(min(stored, high))
        blocks = chunk.sequence.table.blocks[place.group][begin:end]
        if gone := blocks.count(NO_BLOCK):
            begin, blocks = begin + gone, blocks[gone:]
        behind = max(0, begin * block - low)
        scratch = self._take(len(blocks) * block, pool.spec.group)
        pool.gather(place.index, torch.tensor(blocks, device=scratch.device), scratch)
        seen = scratch[:, :, low + behind - begin * block : min(stored, high) - begin * block]
        if (missing := high - low - behind - seen.shape[2]) > 0 or behind:
            seen = F.pad(seen, (0, 0, behind, missing))
        return seen[0], seen[1]

    def _take(self, length: int, group: KVGroup) -> torch.Tensor:
        numel = 2 * group.kv_heads * length * group.head_dim
        if self._scratch.numel() < numel:
            self._scratch = self._scratch.new_empty(numel)
        return self._scratch[:numel].view(2, group.kv_heads, length, group.head_dim)

    def _places(self, batch: Batch, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block id and offset of every token of the pass: two tensors [T], the same for all layers of a group."""
        if self._placed is not batch:
            self._placed = batch
            device, groups = self._scratch.device, range(len(self.cache.pools))
            self._places_of = [_destinations(batch, index, self.cache.block, device) for index in groups]
        return self._places_of[group]


def _destinations(batch: Batch, group: int, block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    positions = [torch.arange(chunk.past, chunk.past + chunk.count) for chunk in batch.chunks]
    block_ids = [
        torch.tensor(chunk.sequence.table.blocks[group])[position // block]
        for chunk, position in zip(batch.chunks, positions, strict=True)
    ]
    return torch.cat(block_ids).to(device), (torch.cat(positions) % block).to(device)


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
    low = 0 if call.window is None else max(0, begin - call.window + 1)
    if call.chunk is not None:
        low = begin // call.chunk * call.chunk
    if not tiled:
        return low, end
    return low // TILE_KEYS * TILE_KEYS, -(-end // TILE_KEYS) * TILE_KEYS


def _mask(call: AttentionCall, rows: range, keys: range, like: torch.Tensor) -> torch.Tensor | None:
    """[len(rows), len(keys)] of 0 and -inf; None where every row sees every key."""
    last_is_seen = len(rows) == 1 and rows.stop == keys.stop
    if last_is_seen and (call.window is None or len(keys) <= call.window):
        return None
    row = torch.arange(rows.start, rows.stop, device=like.device).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop, device=like.device)
    hidden = key > row
    if call.window is not None:
        hidden |= key <= row - call.window
    if call.chunk is not None:
        hidden |= key // call.chunk != row // call.chunk
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
