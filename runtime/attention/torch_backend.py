"""Attention in torch alone: for CPUs, for latents on a device, and the fallback everywhere.

Rows of prompts attend sequence by sequence, generated tokens of several sequences at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from ...offload.machine.hardware import num_workers
from ...quant.matmul.thread_pool import WorkerPool
from ..engine.sequence import Batch, TokenChunk
from ..kv.allocator import NO_BLOCK
from ..kv.cache import KVCache, LayerIndex
from ..kv.pool import KVPool
from ..shape.model_shape import KVGroup
from .choice import GATHERED_NUMEL, ROWS
from .native_rows import AttentionSteps, RowAttention, RowQuery, computes, stored, stores_plainly
from .protocol import AttentionCall, GroupSlots, PassSlots, StoreFunction, check_reach, decodes, is_causal_prefill


def attend_rows(
    call: AttentionCall,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [n, Hq, D] over keys, values [Hkv, L, D]; mask [n, L] and shift [n, Hq] are added to the scores.

    Returns [n, Hq, D]. The query heads of one KV head become rows of one matrix: on a CPU this is 10 to 25 times faster
    than repeating keys and values, and than `enable_gqa`.
    """
    num_rows, num_heads, _ = q.shape
    kv_heads, _, value_dim = values.shape

    def fold(x: torch.Tensor) -> torch.Tensor:
        return x.view(num_rows, kv_heads, num_heads // kv_heads, -1).transpose(0, 1).reshape(kv_heads, -1, x.shape[-1])

    if mask is not None:
        mask = mask.repeat_interleave(num_heads // kv_heads, dim=0)
    extra = _Extra(
        mask,
        None if shift is None else fold(shift.unsqueeze(-1)),
        None if call.sinks is None else fold(call.sinks.float().expand(num_rows, -1).unsqueeze(-1)),
    )
    out = _softmax_sum(call, fold(q.to(keys.dtype)), keys, values, extra)
    return out.view(kv_heads, num_rows, -1, value_dim).transpose(0, 1).reshape(num_rows, num_heads, value_dim)


def attend_tokens(
    call: AttentionCall,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query of each of S sequences, q [S, Hq, D], over its keys and values [Hkv, S, L, D]: [S, Hq, D].

    mask [S, L] and shift [S, Hq] are added to the scores.
    """
    kv_heads, num = keys.shape[:2]

    def fold(x: torch.Tensor) -> torch.Tensor:
        return x.view(num, kv_heads, -1, x.shape[-1]).transpose(0, 1).flatten(0, 1)

    extra = _Extra(
        mask.unsqueeze(1).repeat(kv_heads, 1, 1),
        None if shift is None else fold(shift.unsqueeze(-1)),
        None if call.sinks is None else fold(call.sinks.float().expand(num, -1).unsqueeze(-1)),
    )
    out = _softmax_sum(call, fold(q.to(keys.dtype)), keys.flatten(0, 1), values.flatten(0, 1), extra)
    return out.view(kv_heads, num, -1, out.shape[-1]).transpose(0, 1).flatten(1, 2)


def attend_fresh(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of a whole prompt over itself: q [n, Hq, D], k, v [n, Hkv, D] -> [n, Hq, D].

    Only for calls without softcap and sinks, and without a window that ends before the first token.
    """
    q, k, v = (x.to(k.dtype).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=call.scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def visibility(call: AttentionCall, rows: range, keys: range, like: torch.Tensor) -> torch.Tensor | None:
    """Mask [len(rows), len(keys)] of 0 and -inf to add to the scores; None where every row attends to every key."""
    if len(rows) == 1 and rows.stop == keys.stop and call.first_visible(rows.start) <= keys.start:
        return None
    row = torch.arange(rows.start, rows.stop, device=like.device).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop, device=like.device)
    hidden = key > row
    if call.window is not None:
        hidden |= key <= row - call.window
    if call.chunk is not None:
        hidden |= key // call.chunk != row // call.chunk
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


class _Extra(NamedTuple):
    """What is added to the products that scores [Hkv, m, L] begin as: mask [m, L] or [Hkv, 1, L], shift and sinks
    [Hkv, m, 1]."""

    mask: torch.Tensor | None
    shift: torch.Tensor | None
    sinks: torch.Tensor | None


def _softmax_sum(
    call: AttentionCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, extra: _Extra
) -> torch.Tensor:
    """q [Hkv, m, D], keys, values [Hkv, L, D] -> [Hkv, m, D]."""
    if call.softcap is None and extra.sinks is None:
        # Masks of three dimensions would take a way that scales a copy of all keys.
        mask = extra.mask if extra.mask is None or extra.mask.dim() == 2 else extra.mask.unsqueeze(0)
        q, keys, values = (x.unsqueeze(0) for x in (q, keys, values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=call.scale).squeeze(0)
    scores = torch.matmul(q, keys.transpose(1, 2)).float() * call.scale
    if extra.shift is not None:
        scores += extra.shift
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if extra.mask is not None:
        scores += extra.mask
    if extra.sinks is not None:
        scores = torch.cat([scores, extra.sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return torch.matmul(probabilities.to(values.dtype), values)


class KeyMeans:
    """An attention backend that records the mean key of every layer, for passes of one short chunk without a past.

    `means` [H, D] by layer are those of the last pass.
    """

    def __init__(self) -> None:
        self.means: dict[int, torch.Tensor] = {}

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        self.means[call.layer] = k.float().mean(0).cpu()
        if call.latent is not None:
            k, v = call.latent.expand(k.squeeze(1), v.squeeze(1), slice(None))
        mask = visibility(call, range(len(q)), range(len(q)), k)
        return attend_rows(call, q.contiguous(), k.transpose(0, 1), v.transpose(0, 1), mask)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRun:
    """Generated and drafted tokens, `rows` int64 [S] of the pass, whose keys are gathered together: L positions each.

    `block_ids` [S * m] are those of all of them, one after the other. `mask` [S, L] is -inf where a token does not
    attend to a position, else 0; `blank` are the numbers of the former in [S * L], whose bytes may be NaN.
    """

    rows: torch.Tensor
    block_ids: torch.Tensor
    mask: torch.Tensor
    blank: torch.Tensor


class _Row(NamedTuple):
    """The token of a chunk at the position `past`."""

    chunk: TokenChunk
    past: int


class DecodeRuns:
    """The runs of a pass in a layer group, which its layers share."""

    def __init__(self, cache: KVCache, dtype: torch.dtype, device: torch.device | str) -> None:
        self._cache = cache
        self._dtype = dtype
        self._device = device
        self._runs: WeakKeyDictionary[GroupSlots, list[DecodeRun]] = WeakKeyDictionary()

    def of(self, call: AttentionCall, group: int, slots: GroupSlots) -> list[DecodeRun]:
        """The runs of chunks that decode."""
        if slots not in self._runs:
            chunks = [chunk for chunk in slots.tables if decodes(call, chunk)]
            rows = [_Row(chunk, chunk.past + index) for chunk in chunks for index in range(chunk.count)]
            self._runs[slots] = [self._run(call, group, some) for some in self._split(call, group, rows)]
        return self._runs[slots]

    def _split(self, call: AttentionCall, group: int, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Runs of rows, longest pasts first, of at most GATHERED_NUMEL elements of keys, or of one row."""
        spec = self._cache.pools[group].spec
        rows = sorted(rows, key=lambda row: call.first_visible(row.past) - row.past)
        while rows:
            tokens = len(self._blocks(call, group, rows[0])) * spec.block
            count = max(1, GATHERED_NUMEL // (tokens * spec.group.kv_heads * spec.group.head_dim))
            yield rows[:count]
            rows = rows[count:]

    def _blocks(self, call: AttentionCall, group: int, row: _Row) -> list[int]:
        block = self._cache.block
        table = row.chunk.sequence.table.blocks[group]
        return table[call.first_visible(row.past) // block : row.past // block + 1]

    def _run(self, call: AttentionCall, group: int, each: list[_Row]) -> DecodeRun:
        block, tables = self._cache.block, [self._blocks(call, group, row) for row in each]
        most = max(map(len, tables))
        # Whatever block fills up a table is hidden.
        padded = torch.tensor([table + [NO_BLOCK] * (most - len(table)) for table in tables]).clamp_(min=0)
        pasts = torch.tensor([row.past for row in each]).unsqueeze(1)
        firsts = torch.tensor([call.first_visible(row.past) for row in each]).unsqueeze(1)
        positions = firsts // block * block + torch.arange(most * block)
        hidden = (positions < firsts) | (positions > pasts)
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
        rows = torch.tensor([row.chunk.begin + row.past - row.chunk.past for row in each])
        numbers = (rows, padded.flatten(), mask, hidden.flatten().nonzero().flatten())
        return DecodeRun(*(each.to(self._device) for each in numbers))


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
    def of(cls, call: AttentionCall, pool: KVPool, index: int, q: torch.Tensor) -> Self:
        shift = None
        if pool.key_transform is not None and not call.is_plain:
            shift = pool.key_transform.shifts(index, q).mul_(call.scale)
        return cls(call, pool, index, pool.queries(q), shift)


class TorchAttention:
    """Computes generated tokens and chunks of prompts over keys and values that are gathered from the cache into a
    scratch; tokens of several sequences at once.

    `tiled` computes query rows in tiles aligned to their position in the sequence, over keys padded to a multiple of
    TILE_KEYS: the bits of a token's result then depend neither on its chunk nor on the batch or the block size.
    """

    def __init__(
        self,
        cache: KVCache,
        dtype: torch.dtype,
        tiled: bool,
        device: torch.device | str = "cpu",
        store: StoreFunction | None = None,
        native: bool = False,
    ) -> None:
        """`store` writes keys and values into the pool; torch does where it is None.

        `native`: CPU kernels compute generated tokens and short chunks of prompts, and where `tiled` every row; no
        row's bits depend on others.
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
            plan = self._native.plan(call, batch, layer_index.group, "all" if self.tiled else "few")
            if plan is not None:
                keys, values = stored(pool, layer_index.index)
                self._native.attend(RowQuery.of(call, pool, layer_index.index, q), [keys], values, plan, out)
        elif not self.tiled and any(decodes(call, chunk) for chunk in batch.chunks):
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
        """Fills the rows of `out` of chunks of prompts that no kernel computes; where `tiled`, all rows."""
        (q, k, v), pool = qkv, self.cache.pools[layer_index.group]
        by_rows = decodes if self._native is None else computes
        prompts = [chunk for chunk in batch.chunks if self.tiled or not by_rows(call, chunk)]
        fresh = {chunk for chunk in prompts if not self.tiled and is_causal_prefill(call, chunk)}
        if fresh:
            # One after the other, each of many chunks would take as long as all of them.
            q, (k, v) = pool.queries(q), pool.as_stored(layer_index.index, k, v)
        for chunk in prompts:
            rows = slice(chunk.begin, chunk.end)
            if chunk in fresh:
                out[rows] = attend_fresh(call, q[rows], k[rows], v[rows])
            else:
                self.attend_past(call, layer_index, chunk, qkv[0][rows], out[rows])

    def attend_past(
        self, call: AttentionCall, layer_index: LayerIndex, chunk: TokenChunk, q: torch.Tensor, out: torch.Tensor
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
            mask = self.mask(call, chunk, range(begin, end), range(low, high), keys)
            result = self._attend_tile(call, chunk, range(begin, end), (tile, keys, values), mask, shift)
            out[rows] = result[before : before + last - first]

    def mask(
        self, call: AttentionCall, chunk: TokenChunk, rows: range, positions: range, keys: torch.Tensor
    ) -> torch.Tensor | None:
        """The mask [rows, positions] that is added to scores over `keys` [H, L, D]; None where it is zeros."""
        return visibility(call, rows, positions, keys)

    def _attend_tile(
        self,
        call: AttentionCall,
        chunk: TokenChunk,
        rows: range,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        shift: torch.Tensor | None,
    ) -> torch.Tensor:
        """`attend_rows` of the rows of a chunk's tile, which are positions."""
        return attend_rows(call, *qkv, mask, shift)


class CacheReader:
    """Gathers keys and values of one sequence into a scratch. On a CPU it only grows, and each read overwrites the last
    one's."""

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
        scratch = self._scratch
        if scratch.numel() < sum(numels):
            scratch = scratch.new_empty(sum(numels))
            # A device's allocator keeps the memory, and what stayed while it grew would divide that of later passes.
            self._scratch = scratch if scratch.device.type == "cpu" else self._scratch
        parts = torch.split(scratch[: sum(numels)], numels)
        return [part.view(group.kv_heads, length, width) for part, width in zip(parts, widths, strict=True)]


def row_tiles(chunk: TokenChunk, aligned: bool) -> Iterator[tuple[int, int]]:
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
