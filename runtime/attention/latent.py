"""Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over latents and rotated keys of all tokens, or of chosen ones.

Prompts expand the latents that they attend to, some heads at a time. Decode uses the absorbed form: queries and sums of
latents are multiplied with the two parts of the matrix that makes keys and values, so that all heads read one latent
per token. With an indexer (sparse attention) a token attends to tokens that it chooses: a prompt's rows with a mask,
a generated token to what is gathered.

Token t scores the tokens s up to itself by the sum over the indexer's heads h of w[t, h] * relu(q[t, h] · k[s]), and
attends to those with the highest scores. The keys k have blocks of their own in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ...offload.machine.hardware import num_workers
from ...quant.matmul.thread_pool import WorkerPool
from ..engine.sequence import Batch, TokenChunk
from ..kv.cache import KVCache, LayerIndex
from ..kv.pool import KVPool
from ..settings.errors import UnsupportedModel
from .choice import EXPANDED_NBYTES, SCORED_NUMEL
from .native_rows import RowAttention, RowQuery, stored
from .protocol import (
    AttentionCall,
    BlockQuery,
    IndexQuery,
    LatentWeights,
    PassSlots,
    check_reach,
    decodes,
    is_causal_prefill,
)
from .torch_backend import (
    TILE_KEYS,
    CacheReader,
    DecodeRun,
    DecodeRuns,
    attend_fresh,
    attend_rows,
    attend_tokens,
    key_range,
    row_tiles,
    visibility,
)


class TokenChooser:
    """Stores the keys of indexers, and chooses tokens by them."""

    def __init__(self, cache: KVCache, slots: PassSlots, device: torch.device | str) -> None:
        self._cache = cache
        self._slots = slots
        self._reader = CacheReader(cache, torch.float32, device)
        # Rows that left tokens out so far; layers that share a choice count once.
        self.num_chosen = 0

    def store(self, index: IndexQuery | BlockQuery, batch: Batch) -> None:
        """Stores the pass's keys of one indexer."""
        location, pool = self._of(index)
        slots, keys = self._slots.of(batch, location.group), index.k[: batch.num_tokens]
        pool.write(location.index, slots.block_ids, slots.offsets, keys, keys[..., :0])

    def choose(self, index: IndexQuery, chunk: TokenChunk, rows: range, length: int) -> torch.Tensor:
        """The positions int32 [len(rows), min(count, length)] that rows, which are positions, attend to.

        Positions behind a row are among them only where fewer tokens are before it. Rows outside the chunk have any.
        The bits of a row's scores depend on rows and length, and on neither the chunk nor other sequences.
        """
        key = chunk.begin, rows.start
        if key not in index.chosen:
            scores = self._scores(index, chunk, rows, length)
            index.chosen[key] = scores.topk(min(index.count, length), sorted=False).indices.int()
        return index.chosen[key]

    def hide(
        self, mask: torch.Tensor | None, index: IndexQuery, chunk: TokenChunk, rows: range, like: torch.Tensor
    ) -> torch.Tensor:
        """The mask [len(rows), L] that is added to scores over like [H, L, D], with -inf for what was not chosen."""
        length = like.shape[1]
        hidden = torch.ones(len(rows), length, dtype=torch.bool, device=like.device)
        hidden.scatter_(1, self.choose(index, chunk, rows, length).long(), False)
        if mask is None:
            mask = like.new_zeros(hidden.shape)
        return mask.masked_fill_(hidden, float("-inf"))

    def _of(self, index: IndexQuery | BlockQuery) -> tuple[LayerIndex, KVPool]:
        location = self._cache.indexers[index.layer]
        return location, self._cache.pools[location.group]

    def _scores(self, index: IndexQuery, chunk: TokenChunk, rows: range, length: int) -> torch.Tensor:
        """The scores float32 [len(rows), length], -inf behind each row."""
        q, keys, (mine, around) = self._operands(index, chunk, rows, length)
        scores = weighted(q, F.pad(index.weights[mine], (0, 0, *around)), keys)
        positions = torch.arange(length, device=scores.device)
        behind = positions > torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(1)
        return scores.masked_fill_(behind, float("-inf"))

    def _operands(
        self, index: IndexQuery | BlockQuery, chunk: TokenChunk, rows: range, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[slice, tuple[int, int]]]:
        """Queries [len(rows), H, D] and keys [length, D] in float32, zeros where the chunk has no row and the sequence
        no token; and which rows of the pass these are, with the zeros before and behind them."""
        location, pool = self._of(index)
        self.num_chosen += len(rows)
        end = chunk.past + chunk.count
        first, last = max(rows.start, chunk.past), min(rows.stop, end)
        mine = slice(chunk.begin + first - chunk.past, chunk.begin + last - chunk.past)
        around = (first - rows.start, rows.stop - last)
        q = F.pad(pool.queries(index.q[mine]).float(), (0, 0, 0, 0, *around))
        blocks = chunk.sequence.table.blocks[location.group]
        return q, self._reader.read(location, blocks, 0, length, min(last, length))[0][0], (mine, around)


def weighted(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [n, H, D], weights [n, H], keys [L, D] -> [n, L]: weighted sums of positive products, some keys at a time."""
    num_rows, heads, dim = q.shape
    products = q.reshape(-1, dim)
    piece = max(1, SCORED_NUMEL // (num_rows * heads * TILE_KEYS)) * TILE_KEYS
    parts = []
    for begin in range(0, len(keys), piece):
        positive = (products @ keys[begin : begin + piece].T).relu_().view(num_rows, heads, -1)
        parts.append(torch.bmm(weights.unsqueeze(1), positive).squeeze(1))
    return torch.cat(parts, 1)


class LatentAttention:
    """The backend of models whose layers all cache latents, in torch on any device.

    `tiled` computes every row in the absorbed form, in tiles aligned to positions in the sequence: the bits of a
    token's result then depend neither on its chunk nor on the batch, and a generated token expands nothing.
    """

    def __init__(
        self,
        cache: KVCache,
        dtype: torch.dtype,
        tiled: bool,
        device: torch.device | str = "cpu",
        native: bool = False,
    ) -> None:
        """`native`: CPU kernels compute generated tokens, unless `tiled`."""
        self.cache = cache
        self.tiled = tiled
        # The chunks of prompts that expanded latents so far, and the tokens that used the absorbed form.
        self.num_expanded = 0
        self.num_absorbed = 0
        self._reader = CacheReader(cache, dtype, device)
        self._slots = PassSlots(cache, device)
        self.chooser = TokenChooser(cache, self._slots, device)
        # On a GPU one thread keeps the device busy; deterministic rows all take the path of prompts.
        workers = WorkerPool(1 if tiled or torch.device(device).type != "cpu" else num_workers())
        self._native = RowAttention(cache, dtype, workers) if native and not tiled else None
        self._runs = DecodeRuns(cache, dtype, device)

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Stores latents k [T, 1, R] and rotated keys v [T, 1, P]; q [T, Hq, N + P] -> [T, Hq, V]."""
        layer_index, weights = self.cache.layer_indices[call.layer], _weights(call)
        pool, slots = self.cache.pools[layer_index.group], self._slots.of(batch, layer_index.group)
        check_reach(call, pool.spec.group)
        pool.write(layer_index.index, slots.block_ids, slots.offsets, k, v)
        if call.index is not None and call.index.layer == call.layer:
            self.chooser.store(call.index, batch)
        out = q.new_empty(*q.shape[:2], weights.value_rows)
        for chunk in batch.chunks:
            rows = slice(chunk.begin, chunk.end)
            if self.tiled:
                self._absorbed_rows(call, layer_index, chunk, q[rows], out[rows])
            elif is_causal_prefill(call, chunk):
                fresh = pool.as_stored(layer_index.index, k[rows], v[rows])
                self._expanded(call, layer_index, chunk, q[rows], fresh, out[rows])
            elif decodes(call, chunk):
                continue
            elif chunk.count > 1:
                blocks, end = chunk.sequence.table.blocks[layer_index.group], chunk.past + chunk.count
                low = call.first_visible(chunk.past)
                past = self._reader.read(layer_index, blocks, low, end, end)
                self._expanded(call, layer_index, chunk, q[rows], (past[0][0, :, None], past[1][0, :, None]), out[rows])
            else:
                self._chosen_row(call, layer_index, chunk, q[rows], slots.tables[chunk], out[rows])
        if self._native is not None:
            self._decode_natively(call, layer_index, q, batch, out)
        elif not self.tiled and any(decodes(call, chunk) for chunk in batch.chunks):
            for run in self._runs.of(call, layer_index.group, slots):
                self._decode(call, layer_index, q, run, out)
        return out

    def _expanded(
        self,
        call: AttentionCall,
        layer_index: LayerIndex,
        chunk: TokenChunk,
        q: torch.Tensor,
        stored: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Fills out [n, Hq, V] for the n rows q of a chunk; `stored` are the latents and rotated keys that it sees."""
        self.num_expanded += 1
        weights, pool = _weights(call), self.cache.pools[layer_index.group]
        latents = pool.restored(layer_index.index, stored[0]).to(q.dtype).squeeze(1)
        rotated = stored[1].to(q.dtype).squeeze(1)
        end, fresh = chunk.past + chunk.count, is_causal_prefill(call, chunk)
        for heads in _head_runs(weights, len(latents), q.shape[-1] * q.itemsize):
            keys, values = weights.expand(latents, rotated, heads)
            # Only heads of equal length have a kernel that keeps no scores.
            width = max(keys.shape[-1], values.shape[-1])
            mine, keys, values = (_widen(x, width) for x in (q[:, heads], keys, values))
            if fresh:
                out[:, heads] = attend_fresh(call, mine, keys, values)[..., : weights.value_rows]
                continue
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
            for begin, last in row_tiles(chunk, aligned=False):
                rows = slice(begin - chunk.past, last - chunk.past)
                mask = visibility(call, range(begin, last), range(end - len(latents), end), keys)
                if call.index is not None and call.leaves_out(end):
                    mask = self.chooser.hide(mask, call.index, chunk, range(begin, last), keys)
                result = attend_rows(call, mine[rows], keys, values, mask)
                out[rows, heads] = result[..., : weights.value_rows]

    def _absorbed_rows(
        self, call: AttentionCall, layer_index: LayerIndex, chunk: TokenChunk, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Fills out [n, Hq, V] for the n rows q of one chunk, in aligned tiles of rows and keys."""
        self.num_absorbed += chunk.count
        weights, pool = _weights(call), self.cache.pools[layer_index.group]
        blocks = chunk.sequence.table.blocks[layer_index.group]
        for begin, end in row_tiles(chunk, aligned=True):
            # These are positions in the sequence; rows of the tile that are outside the chunk are computed as zeros.
            first, last = max(begin, chunk.past), min(end, chunk.past + chunk.count)
            rows = slice(first - chunk.past, last - chunk.past)
            tile = F.pad(q[rows], (0, 0, 0, 0, first - begin, end - last))
            low, high = key_range(call, begin, end, tiled=True)
            latents, rotated = self._reader.read(layer_index, blocks, low, high, last)
            # Latents are values too; the columns behind them cost less than another copy.
            keys = torch.cat([latents, rotated], -1)
            mask = visibility(call, range(begin, end), range(low, high), keys)
            if call.index is not None and call.leaves_out(end):
                mask = self.chooser.hide(mask, call.index, chunk, range(begin, end), keys)
            sums = attend_rows(call, _absorbed(weights, pool, tile), keys, keys, mask)[..., : latents.shape[-1]]
            values = weights.values_of(pool.restored(layer_index.index, sums).to(q.dtype))
            out[rows] = values[first - begin : last - begin]

    def _chosen_row(
        self,
        call: AttentionCall,
        layer_index: LayerIndex,
        chunk: TokenChunk,
        q: torch.Tensor,
        table: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fills out [1, Hq, V] for the one row q of a chunk; `table` are the ids of its sequence's blocks."""
        assert call.index is not None
        self.num_absorbed += 1
        weights, pool = _weights(call), self.cache.pools[layer_index.group]
        end, block = chunk.past + 1, self.cache.block
        positions = self.chooser.choose(call.index, chunk, range(chunk.past, end), end)[0].long()
        latents, rotated = pool.tokens(layer_index.index, table[positions // block], positions % block, q.dtype)
        keys = torch.cat([latents, rotated], -1).transpose(0, 1)
        sums = attend_rows(call, _absorbed(weights, pool, q), keys, keys, None)[..., : latents.shape[-1]]
        out.copy_(weights.values_of(pool.restored(layer_index.index, sums).to(q.dtype)))

    def _decode(
        self, call: AttentionCall, layer_index: LayerIndex, q: torch.Tensor, run: DecodeRun, out: torch.Tensor
    ) -> None:
        """Fills the rows of `out` that a run has."""
        self.num_absorbed += len(run.rows)
        weights, pool = _weights(call), self.cache.pools[layer_index.group]
        latents, rotated = self._reader.gather(layer_index, run)
        # As in `_absorbed_rows`.
        keys = torch.cat([latents, rotated], -1)
        sums = attend_tokens(call, _absorbed(weights, pool, q[run.rows]), keys, keys, run.mask)
        values = pool.restored(layer_index.index, sums[..., : latents.shape[-1]]).to(q.dtype)
        out[run.rows] = weights.values_of(values)

    def _decode_natively(
        self, call: AttentionCall, layer_index: LayerIndex, q: torch.Tensor, batch: Batch, out: torch.Tensor
    ) -> None:
        """Does what `_decode` does, with the CPU kernels."""
        assert self._native is not None
        plan = self._native.plan(call, batch, layer_index.group, "gathered")
        if plan is None:
            return
        self.num_absorbed += len(plan.rows)
        weights, pool = _weights(call), self.cache.pools[layer_index.group]
        latents, rotated = stored(pool, layer_index.index)
        query = RowQuery(call, _absorbed(weights, pool, q[plan.rows]))
        sums = torch.empty(*query.q.shape[:2], latents.width)
        self._native.attend(query, [latents, rotated], latents, plan, sums)
        out[plan.rows] = weights.values_of(pool.restored(layer_index.index, sums).to(q.dtype))


def _weights(call: AttentionCall) -> LatentWeights:
    """Raises UnsupportedModel for what weights of averages that do not sum to one, or other scores, would need."""
    if call.latent is None or not call.is_plain:
        raise UnsupportedModel(f"layer {call.layer}: latent attention with sinks or bounded scores is not supported")
    return call.latent


def _absorbed(weights: LatentWeights, pool: KVPool, q: torch.Tensor) -> torch.Tensor:
    """Queries [T, Hq, N + P] in the absorbed form and the basis of the stored latents: [T, Hq, R + P]."""
    absorbed = pool.queries(weights.absorb(q[..., : weights.key_rows]).contiguous())
    return torch.cat([absorbed, q[..., weights.key_rows :].to(absorbed.dtype)], -1)


def _head_runs(weights: LatentWeights, length: int, head_nbytes: int) -> Iterator[slice]:
    """Runs of heads whose keys and values of `length` tokens take at most EXPANDED_NBYTES; at least one head."""
    count = max(1, EXPANDED_NBYTES // (3 * length * head_nbytes))
    for begin in range(0, len(weights.matrix), count):
        yield slice(begin, begin + count)


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
