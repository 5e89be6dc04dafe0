"""Attention in torch alone: for CPUs, and the fallback everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...offload.machine.hardware import num_workers
from ...quant.matmul.thread_pool import WorkerPool
from ..engine.batch import Batch, Chunk
from ..kv.allocator import NO_BLOCK
from ..kv.cache import KVCache, LayerIndex
from ..kv.pool import KVPool
from ..shape.model_shape import KVGroup
from .choice import ROWS
from .decode import DecodeRun, DecodeRuns
from .dense import attend_fresh, attend_rows, attend_tokens, visibility
from .native_rows import RowAttention, RowQuery, stored
from .native_steps import AttentionSteps, stores_plainly
from .pass_pages import PassSlots
from .protocol import AttentionCall, Store, check_reach, is_causal_prefill

# Rows and keys of a deterministic call start at multiples of these, however the prompt was cut into chunks.
TILE_ROWS = 16
TILE_KEYS = 64


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer in a pass: q [T, Hq, D] in the basis of the stored keys, and the scaled `shift` [T, Hq] of scores."""

    call: AttentionCall
    pool: KVPool
    index: int
    q: torch.Tensor
    shift: torch.Tensor | None

    @classmethod
    def of(cls, call: AttentionCall, pool: KVPool, index: int, q: torch.Tensor) -> _Layer:
        shift = None
        if pool.key_transform is not None and not call.is_plain:
            shift = pool.key_transform.shifts(index, q).mul_(call.scale)
        return cls(call, pool, index, pool.queries(q), shift)


class TorchAttention:
    """Computes generated tokens and chunks of prompts over keys and values that are gathered from the cache into a
    scratch that only grows; tokens of several sequences at once.

    `tiled` computes query rows in tiles aligned to their position in the sequence, over keys padded to a multiple of
    TILE_KEYS: the bits of a token's result then depend neither on its chunk nor on the batch or the block size.
    """

    def __init__(
        self,
        cache: KVCache,
        dtype: torch.dtype,
        tiled: bool,
        device: torch.device | str = "cpu",
        store: Store | None = None,
        native: bool = False,
    ) -> None:
        """`store` writes keys and values into the pool; torch does where it is None.

        `native`: CPU kernels compute generated tokens, and where `tiled` every row; no row's bits depend on others.
        """
        self.cache = cache
        self._store = store
        self.tiled = tiled
        self._reader = CacheReader(cache, dtype, device)
        self._slots = PassSlots(cache, device)
        # On a GPU one thread keeps the device busy; deterministic rows all take the path of prompts.
        alone = torch.device(device).type != "cpu" or (tiled and not native)
        self._workers = WorkerPool(1 if alone else num_workers())
        self._native = RowAttention(cache, dtype, self._workers) if native else None
        self._runs = DecodeRuns(cache, dtype, device)

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        layer_index = self.cache.layer_indices[call.layer]
        pool, slots = self.cache.pools[layer_index.group], self._slots.of(batch, layer_index.group)
        check_reach(call, pool.spec.group)
        if self._store is None:
            pool.write(layer_index.index, slots.block_ids, slots.offsets, k, v)
        else:
            self._store(pool, layer_index.index, slots.slots, k, v)
        # Contiguous, as the kernels write it, which `q` need not be.
        out = q.new_empty(q.shape)
        if self._native is None or not self.tiled:
            self._prompts(call, layer_index, batch, (q, k, v), out)
        if self._native is not None:
            plan = self._native.plan(call, batch, layer_index.group, "all" if self.tiled else "decode")
            if plan is not None:
                keys, values = stored(pool, layer_index.index)
                self._native.attend(RowQuery.of(call, pool, layer_index.index, q), [keys], values, plan, out)
        elif not self.tiled and any(chunk.count == 1 for chunk in batch.chunks):
            layer = _Layer.of(call, pool, layer_index.index, q)
            for run in self._runs.of(call, layer_index.group, slots):
                shift = None if layer.shift is None else layer.shift[run.rows]
                past_keys, past_values = self._reader.gather(layer_index, run)
                result = attend_tokens(call, layer.q[run.rows], past_keys, past_values, run.mask, shift)
                out[run.rows] = result.to(out.dtype)
        return out

    def steps(
        self, calls: Sequence[AttentionCall], q: torch.Tensor, out: torch.Tensor, threads: int
    ) -> AttentionSteps | None:
        """Attention of all layers over q [T, Hq, D] as steps of the library; None where it is not computed so."""
        if self._native is None or self.tiled or not all(map(stores_plainly, self.cache.pools)):
            return None
        return AttentionSteps(self._native, self.cache, calls, q, out, threads)

    def _prompts(
        self,
        call: AttentionCall,
        layer_index: LayerIndex,
        batch: Batch,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Fills the rows of `out` that are chunks of more than one token; where `tiled`, all rows."""
        (q, k, v), pool = qkv, self.cache.pools[layer_index.group]
        for chunk in batch.chunks:
            rows = slice(chunk.begin, chunk.end)
            if not self.tiled and is_causal_prefill(call, chunk):
                as_stored = pool.as_stored(layer_index.index, k[rows], v[rows])
                out[rows] = attend_fresh(call, pool.queries(q[rows]), *as_stored)
            elif self.tiled or chunk.count > 1:
                self.attend_past(call, layer_index, chunk, q[rows], out[rows])

    def attend_past(
        self, call: AttentionCall, layer_index: LayerIndex, chunk: Chunk, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Fills out [n, Hq, D] for the n rows q of one chunk, after its keys and values have been stored."""
        layer = _Layer.of(call, self.cache.pools[layer_index.group], layer_index.index, q)
        blocks = chunk.sequence.table.blocks[layer_index.group]
        for begin, end in row_tiles(chunk, self.tiled):
            # These are positions in the sequence; rows of the tile that are outside the chunk are computed as zeros.
            first = max(begin, chunk.past)
            last = min(end, chunk.past + chunk.count)
            rows = slice(first - chunk.past, last - chunk.past)
            before, after = (first - begin, end - last) if self.tiled else (0, 0)
            tile = F.pad(layer.q[rows], (0, 0, 0, 0, before, after))
            shift = None if layer.shift is None else F.pad(layer.shift[rows], (0, 0, before, after))
            low, high = key_range(call, begin, end, self.tiled)
            keys, values = self._reader.read(layer_index, blocks, low, high, last)
            mask = visibility(call, range(begin, end), range(low, high), keys)
            result = attend_rows(call, tile, keys, values, mask, shift)
            out[rows] = result[before : before + last - first]


class CacheReader:
    """Gathers keys and values of one sequence into a scratch that only grows; each read overwrites the last one's."""

    def __init__(self, cache: KVCache, dtype: torch.dtype, device: torch.device | str) -> None:
        self._cache = cache
        self._scratch = torch.empty(0, dtype=dtype, device=device)

    def read(
        self, layer: LayerIndex, blocks: list[int], low: int, high: int, stored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [H, high - low, D] of positions low to high, in the basis of the stored keys.

        They are zeros in blocks that were given back and from `stored` on, not the bytes in the cache: the slot's last
        owner may have left NaN, and 0 * NaN is NaN.
        """
        pool, block = self._cache.pools[layer.group], self._cache.block
        begin, end = low // block, pool.spec.blocks_for(min(stored, high))
        if released := blocks[begin:end].count(NO_BLOCK):
            begin += released
        behind = max(0, begin * block - low)
        sides = self._take((end - begin) * block, pool.spec.group)
        pool.gather(layer.index, torch.tensor(blocks[begin:end], device=self._scratch.device), sides)
        rows = slice(low + behind - begin * block, min(stored, high) - begin * block)
        keys, values = (side[:, rows] for side in sides)
        if (missing := high - low - behind - keys.shape[1]) > 0 or behind:
            return F.pad(keys, (0, 0, behind, missing)), F.pad(values, (0, 0, behind, missing))
        return keys, values

    def gather(self, layer: LayerIndex, run: DecodeRun) -> list[torch.Tensor]:
        """Keys and values [H, S, L, D] of the sequences of a run, in the basis of the stored keys.

        They are zeros at positions that are hidden, as those of `read`.
        """
        pool = self._cache.pools[layer.group]
        sides = self._take(run.mask.numel(), pool.spec.group)
        pool.gather(layer.index, run.block_ids, sides)
        return [
            side.index_fill_(1, run.blank, 0).view(side.shape[0], *run.mask.shape, side.shape[-1]) for side in sides
        ]

    def _take(self, length: int, group: KVGroup) -> list[torch.Tensor]:
        """Uninitialized keys and values [H, length, D]."""
        widths = (group.head_dim, group.value_dim)
        numels = [group.kv_heads * length * width for width in widths]
        if self._scratch.numel() < sum(numels):
            self._scratch = self._scratch.new_empty(sum(numels))
        parts = torch.split(self._scratch[: sum(numels)], numels)
        return [part.view(group.kv_heads, length, width) for part, width in zip(parts, widths, strict=True)]


def row_tiles(chunk: Chunk, aligned: bool) -> Iterator[tuple[int, int]]:
    """Ranges of positions that cover the chunk: aligned to TILE_ROWS, or of up to ROWS positions."""
    last = chunk.past + chunk.count
    if aligned:
        for begin in range(chunk.past // TILE_ROWS * TILE_ROWS, last, TILE_ROWS):
            yield begin, begin + TILE_ROWS
    else:
        for begin in range(chunk.past, last, ROWS):
            yield begin, min(begin + ROWS, last)


def key_range(call: AttentionCall, begin: int, end: int, tiled: bool) -> tuple[int, int]:
    """The range of key positions that rows begin to end attend to."""
    low = call.first_visible(begin)
    if not tiled:
        return low, end
    return low // TILE_KEYS * TILE_KEYS, -(-end // TILE_KEYS) * TILE_KEYS
