"""Attention over keys and values for each head where an indexer chooses blocks of tokens (sparse attention).

A block of tokens has the mean of their keys, normalized and rotated as its first token. Token t scores the blocks up to
itself by the sum over the indexer's heads of relu(q[t, h] · k[b]), and attends to the tokens of those with the highest
scores, and to tokens behind the last whole block. Up to `count` tokens that is all of them. The keys of tokens have
blocks of their own in the cache: means cannot be kept there, because prompts are cut anywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..engine.sequence import Batch, TokenChunk
from ..kv.cache import KVCache
from .latent import TokenChooser, weighted
from .protocol import AttentionCall, IndexQuery
from .torch_backend import TorchAttention


class BlockChooser(TokenChooser):
    """Chooses blocks of tokens."""

    def hide(
        self, mask: torch.Tensor | None, index: IndexQuery, chunk: TokenChunk, rows: range, like: torch.Tensor
    ) -> torch.Tensor:
        """The mask [len(rows), L] that is added to scores over like [H, L, D], with -inf for what was not chosen.

        What is behind a row is hidden already.
        """
        blocks, length = index.blocks, like.shape[1]
        assert blocks is not None
        scores = self._block_scores(index, chunk, rows, length // blocks.size * blocks.size)
        whole = torch.arange(rows.start + 1, rows.stop + 1, device=like.device).unsqueeze(1) // blocks.size
        scores.masked_fill_(torch.arange(scores.shape[1], device=like.device) >= whole, float("-inf"))
        best = scores.topk(min(blocks.most, scores.shape[1]), sorted=False).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True).repeat_interleave(blocks.size, 1)
        seen = F.pad(chosen, (0, length - chosen.shape[1]))
        seen |= torch.arange(length, device=like.device) >= whole * blocks.size
        if mask is None:
            mask = like.new_zeros(seen.shape)
        return mask.masked_fill_(~seen, float("-inf"))

    def _block_scores(self, index: IndexQuery, chunk: TokenChunk, rows: range, length: int) -> torch.Tensor:
        """The scores float32 [len(rows), n] of the n blocks of `length` tokens. Rows outside the chunk have any."""
        assert index.blocks is not None
        location, pool = self._of(index)
        first, last = max(rows.start, chunk.past), min(rows.stop, chunk.past + chunk.count)
        mine = slice(chunk.begin + first - chunk.past, chunk.begin + last - chunk.past)
        around = (first - rows.start, rows.stop - last)
        q = F.pad(index.q[mine].float(), (0, 0, 0, 0, *around))
        weights = F.pad(index.weights[mine], (0, 0, *around))
        table = chunk.sequence.table.blocks[location.group]
        stored = self._reader.read(location, table, 0, length, min(last, length))[0]
        keys = pool.restored(location.index, stored[0].unsqueeze(1)).squeeze(1)
        return weighted(q, weights, index.blocks.keys(keys.to(index.k.dtype)).float())


class IndexedAttention(TorchAttention):
    """Attention of a model with such indexers. Rows that leave no token out are computed as those of other models."""

    def __init__(
        self,
        cache: KVCache,
        dtype: torch.dtype,
        tiled: bool,
        device: torch.device | str = "cpu",
        *,
        native: bool = False,
    ) -> None:
        super().__init__(cache, dtype, tiled, device, native=native)
        self.chooser = BlockChooser(cache, self._slots, device)

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        assert call.index is not None
        self.chooser.store(call.index, batch)
        return super().attend(call, q, k, v, batch)

    def mask(
        self, call: AttentionCall, chunk: TokenChunk, rows: range, positions: range, keys: torch.Tensor
    ) -> torch.Tensor | None:
        mask = super().mask(call, chunk, rows, positions, keys)
        if call.index is not None and call.leaves_out(rows.stop):
            self.chooser.num_chosen += len(rows)
            return self.chooser.hide(mask, call.index, chunk, rows, keys)
        return mask
