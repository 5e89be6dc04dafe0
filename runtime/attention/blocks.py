"""Sparse attention by blocks of keys (MiniMax-M3): an indexer's heads choose blocks, each for one KV head's queries.

For token t and head h, a block's score is the largest product q[t, h] · k[s] of its tokens s up to t. Chosen are the
`local` blocks that end with t's own, and those with the highest scores, `blocks` in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..engine.sequence import Batch, TokenChunk
from ..kv.cache import KVCache, LayerIndex
from ..settings.errors import UnsupportedModel
from .choice import SCORED_NUMEL
from .indexed import IndexedAttention
from .latent import TokenChooser
from .protocol import AttentionCall, BlockQuery
from .torch_backend import TorchAttention, attend_rows


class HeadBlockChooser(TokenChooser):
    """Stores the keys of indexers, and chooses blocks by them."""

    def blocks(self, index: BlockQuery, chunk: TokenChunk, rows: range, length: int) -> torch.Tensor:
        """Which blocks of the first `length` tokens rows, which are positions, attend to: bool [H, len(rows), N].

        Rows outside the chunk have any. The bits of a row's scores depend on rows and length, and on neither the chunk
        nor other sequences.
        """
        q, keys, _ = self._operands(index, chunk, rows, length)
        scores = torch.cat(list(_block_scores(q, keys, rows, index.block)), -1)
        own = torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(1) // index.block
        local = (own - torch.arange(index.local, device=scores.device)).clamp_(min=0)
        scores.scatter_(-1, local.expand(len(scores), -1, -1), float("inf"))
        best = scores.topk(min(index.blocks, scores.shape[-1])).indices
        # Blocks behind a row are among the best where fewer are before it.
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (scores > float("-inf"))


def _block_scores(q: torch.Tensor, keys: torch.Tensor, rows: range, block: int) -> Iterator[torch.Tensor]:
    """q [n, H, D], keys [L, D] -> [H, n, blocks], some blocks at a time: their largest products up to each row."""
    num_rows, heads, dim = q.shape
    products, row = q.transpose(0, 1).reshape(-1, dim), torch.arange(rows.start, rows.stop, device=q.device)
    piece = max(1, SCORED_NUMEL // (num_rows * heads * block)) * block
    for begin in range(0, len(keys), piece):
        some = keys[begin : begin + piece]
        found = (products @ some.T).view(heads, num_rows, -1)
        positions = torch.arange(begin, begin + len(some), device=q.device)
        found.masked_fill_(positions > row.unsqueeze(1), float("-inf"))
        found = F.pad(found, (0, -len(some) % block), value=float("-inf"))
        yield found.view(heads, num_rows, -1, block).amax(-1)


class BlockAttention(IndexedAttention):
    """TorchAttention for models whose layers choose, for all heads or for each. What leaves out nothing is computed as
    ever."""

    def __init__(
        self,
        cache: KVCache,
        dtype: torch.dtype,
        tiled: bool,
        device: torch.device | str = "cpu",
        native: bool = False,
    ) -> None:
        super().__init__(cache, dtype, tiled, device, native=native and not tiled)
        self.head_chooser = HeadBlockChooser(cache, self._slots, device)

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        if call.index is not None:
            return super().attend(call, q, k, v, batch)
        if call.blocks is not None:
            self.head_chooser.store(call.blocks, batch)
        return TorchAttention.attend(self, call, q, k, v, batch)

    def _attend_tile(
        self,
        call: AttentionCall,
        chunk: TokenChunk,
        rows: range,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        shift: torch.Tensor | None,
    ) -> torch.Tensor:
        if call.blocks is None or not call.leaves_out(rows.stop):
            return super()._attend_tile(call, chunk, rows, qkv, mask, shift)
        length = qkv[1].shape[1]
        chosen = self.head_chooser.blocks(_query(call), chunk, rows, length)
        seen = chosen.repeat_interleave(_query(call).block, -1)[..., :length]
        return _by_head(call, qkv, seen, mask)

    def attend_past(
        self, call: AttentionCall, layer_index: LayerIndex, chunk: TokenChunk, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        """As ever; but of keys of a single row those are read that one of its heads has chosen."""
        end, block = chunk.past + chunk.count, self.cache.block
        if call.blocks is None or self.tiled or chunk.count > 1 or not call.leaves_out(end):
            super().attend_past(call, layer_index, chunk, q, out)
            return
        index, pool = _query(call), self.cache.pools[layer_index.group]
        chosen = self.head_chooser.blocks(index, chunk, range(chunk.past, end), end)[:, 0]
        some = chosen.any(0).nonzero()
        positions = some * index.block + torch.arange(index.block, device=some.device)
        there = positions.flatten() < end
        positions = positions.flatten()[there]
        table = torch.tensor(chunk.sequence.table.blocks[layer_index.group], device=some.device)
        sides = pool.tokens(layer_index.index, table[positions // block], positions % block, q.dtype)
        keys, values = (side.transpose(0, 1) for side in sides)
        seen = chosen[:, some.flatten()].repeat_interleave(index.block, -1)[:, there]
        out.copy_(_by_head(call, (pool.queries(q), keys, values), seen.unsqueeze(1), None))


def _query(call: AttentionCall) -> BlockQuery:
    """Raises UnsupportedModel for what softmax would take beside scaled scores."""
    if call.blocks is None or not call.is_plain:
        raise UnsupportedModel(f"layer {call.layer}: chosen blocks with sinks or bounded scores are not supported")
    return call.blocks


def _by_head(
    call: AttentionCall,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """q [n, Hq, D] over keys and values [H, L, D], of which the rows of each KV head attend to those `seen` [H, n, L].

    Head by head, because a mask for all of them would be larger than their scores need to be.
    """
    q, keys, values = qkv
    outputs = []
    for head, (part, own) in enumerate(zip(q.chunk(len(keys), 1), seen, strict=True)):
        hiding = keys.new_zeros(own.shape) if mask is None else mask
        hiding = hiding.masked_fill(~own, float("-inf"))
        outputs.append(attend_rows(call, part, keys[head : head + 1], values[head : head + 1], hiding))
    return torch.cat(outputs, 1)
