"""Sparse attention (DSA; DeepSeek-AI, DeepSeek-V3.2, 2025): which tokens each token attends to, as an indexer chooses.

Token t scores the tokens s up to itself by the sum over the indexer's heads h of w[t, h] * relu(q[t, h] · k[s]), and
attends to those with the highest scores. The keys k have blocks of their own in the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..engine.batch import Batch, Chunk
from ..kv.cache import KVCache, LayerIndex
from ..kv.pool import KVPool
from .choice import SCORED_NUMEL
from .pass_pages import PassSlots
from .protocol import IndexQuery
from .torch_backend import TILE_KEYS, CacheReader


class TokenChooser:
    """Stores the keys of indexers, and chooses tokens by them."""

    def __init__(self, cache: KVCache, slots: PassSlots, device: torch.device | str) -> None:
        self._cache = cache
        self._slots = slots
        self._reader = CacheReader(cache, torch.float32, device)
        # Rows that left tokens out so far; layers that share a choice count once.
        self.num_chosen = 0

    def store(self, index: IndexQuery, batch: Batch) -> None:
        """Stores the pass's keys of one indexer."""
        location, pool = self._of(index)
        slots, keys = self._slots.of(batch, location.group), index.k[: batch.num_tokens]
        pool.write(location.index, slots.block_ids, slots.offsets, keys, keys[..., :0])

    def choose(self, index: IndexQuery, chunk: Chunk, rows: range, length: int) -> torch.Tensor:
        """The positions int32 [len(rows), min(count, length)] that rows, which are positions, attend to.

        Positions behind a row are among them only where fewer tokens are before it. Rows outside the chunk have any.
        The bits of a row's scores depend on rows and length, and on neither the chunk nor other sequences.
        """
        key = chunk.begin, rows.start
        if key not in index.chosen:
            scores = self._scores(index, chunk, rows, length)
            index.chosen[key] = scores.topk(min(index.count, length), sorted=False).indices.int()
            self.num_chosen += len(rows)
        return index.chosen[key]

    def hide(
        self, mask: torch.Tensor | None, index: IndexQuery, chunk: Chunk, rows: range, like: torch.Tensor
    ) -> torch.Tensor:
        """The mask [len(rows), L] that is added to scores over like [H, L, D], with -inf for what was not chosen."""
        length = like.shape[1]
        hidden = torch.ones(len(rows), length, dtype=torch.bool, device=like.device)
        hidden.scatter_(1, self.choose(index, chunk, rows, length).long(), False)
        if mask is None:
            mask = like.new_zeros(hidden.shape)
        return mask.masked_fill_(hidden, float("-inf"))

    def _of(self, index: IndexQuery) -> tuple[LayerIndex, KVPool]:
        location = self._cache.indexers[index.layer]
        return location, self._cache.pools[location.group]

    def _scores(self, index: IndexQuery, chunk: Chunk, rows: range, length: int) -> torch.Tensor:
        """The scores float32 [len(rows), length], -inf behind each row."""
        location, pool = self._of(index)
        end = chunk.past + chunk.count
        first, last = max(rows.start, chunk.past), min(rows.stop, end)
        mine = slice(chunk.begin + first - chunk.past, chunk.begin + last - chunk.past)
        around = (first - rows.start, rows.stop - last)
        q = F.pad(pool.queries(index.q[mine]).float(), (0, 0, 0, 0, *around))
        weights = F.pad(index.weights[mine], (0, 0, *around))
        blocks = chunk.sequence.table.blocks[location.group]
        keys = self._reader.read(location, blocks, 0, length, min(last, length))[0][0]
        scores = _weighted(q, weights, keys)
        positions = torch.arange(length, device=scores.device)
        behind = positions > torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(1)
        return scores.masked_fill_(behind, float("-inf"))


def _weighted(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [n, H, D], weights [n, H], keys [L, D] -> [n, L]: weighted sums of positive products, some keys at a time."""
    num_rows, heads, dim = q.shape
    products = q.reshape(-1, dim)
    piece = max(1, SCORED_NUMEL // (num_rows * heads * TILE_KEYS)) * TILE_KEYS
    parts = []
    for begin in range(0, len(keys), piece):
        positive = (products @ keys[begin : begin + piece].T).relu_().view(num_rows, heads, -1)
        parts.append(torch.bmm(weights.unsqueeze(1), positive).squeeze(1))
    return torch.cat(parts, 1)
