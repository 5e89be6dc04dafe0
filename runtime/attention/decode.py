"""The new tokens of a run of sequences over the cache: the operation that a batch job spends most of its attention on.

n sequences, H KV heads, G query heads each, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..kv.pool import take_blocks
from .codes import CodeScratch, Stored, scores, weighted_sum
from .decode_runs import BlockRun, DecodeRun
from .limits import NATIVE_NBYTES, WIDE_NUMEL
from .protocol import AttentionCall


@dataclass(frozen=True, slots=True)
class Query:
    """One token's queries of each sequence, q [H, n, G, D], as they meet stored keys.

    `shift` [H, n, G, 1], scaled, is what scores lack (`KeyFrame.shifts`); None where it does not matter. `sinks`
    [H, 1, G, 1].
    """

    call: AttentionCall
    q: torch.Tensor
    shift: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.call.softcap is None and self.sinks is None


class DecodeScratch:
    """One thread's memory. Sequences whose native keys and values fit into it whole take torch's fused kernel."""

    def __init__(self, sharers: int, block_numel: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """One of `sharers`; `block_numel` are the elements of the largest block's keys."""
        self.codes = CodeScratch(max(WIDE_NUMEL, block_numel), device)
        self._native = torch.empty(NATIVE_NBYTES // sharers // dtype.itemsize, dtype=dtype, device=device)

    def native(self, keys: Stored, values: Stored, num_blocks: int) -> torch.Tensor | None:
        """[2, H, num_blocks, block, D], or None where it is too small or a format is not that of the arithmetic."""
        _, heads, block, width = keys.planes.codes.shape
        numel = 2 * heads * num_blocks * block * width
        same = all(stored.planes.codes.dtype == self._native.dtype for stored in (keys, values))
        return (
            self._native[:numel].view(2, heads, num_blocks, block, width)
            if same and numel <= len(self._native)
            else None
        )


def decode(query: Query, keys: Stored, values: Stored, run: DecodeRun, scratch: DecodeScratch) -> torch.Tensor:
    """[H, n, G, D] in float32 or the arithmetic's dtype."""
    room = scratch.native(keys, values, run.whole.block_ids.numel()) if query.is_plain else None
    if room is None:
        return _decode_codes(query, keys, values, run, scratch.codes)
    return _decode_native(query, keys, values, run.whole, room)


def _decode_native(query: Query, keys: Stored, values: Stored, seen: BlockRun, room: torch.Tensor) -> torch.Tensor:
    """`room` is [2, H, n * B, block, D]."""
    for stored, part in zip((keys, values), room, strict=True):
        take_blocks(stored.planes.codes, seen.block_ids.flatten(), part)
    slots = room.flatten(2, 3)
    if seen.blank is not None:
        # What lies there may be NaN, and 0 * NaN is NaN.
        slots.index_fill_(2, seen.blank, 0)
    k, v = slots.view(2, slots.shape[1], len(seen.block_ids), -1, slots.shape[3])
    mask = None if seen.hidden is None else ~seen.hidden
    return F.scaled_dot_product_attention(query.q, k, v, attn_mask=mask, scale=query.call.scale)


def _decode_codes(query: Query, keys: Stored, values: Stored, run: DecodeRun, scratch: CodeScratch) -> torch.Tensor:
    """Piece by piece: scores of all keys first, which are few numbers, then the values."""
    pieces, hidden = run.pieces, run.whole.hidden
    q = (query.q.float() * query.call.scale).flatten(0, 1)
    found = [scores(q, scratch.gather(keys, piece), keys.format, scratch) for piece in pieces]
    p = probabilities(query, torch.cat(found, -1).view(*query.q.shape[:3], -1), hidden).flatten(0, 1)
    out = torch.zeros_like(q)
    for piece in pieces:
        coded = scratch.gather(values, piece)
        length = coded.codes.shape[1]
        out += weighted_sum(p[..., :length], coded, values.format, scratch)
        p = p[..., length:]
    return out.view(query.q.shape)


def probabilities(query: Query, scores: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """softmax of scores [H, n, G, L], which may be overwritten, with everything that the call asks for.

    `hidden` [n, 1, L] are positions that a token does not see: they count for nothing, whatever was done to scores.
    """
    if query.shift is not None:
        scores += query.shift
    if query.call.softcap is not None:
        scores.div_(query.call.softcap).tanh_().mul_(query.call.softcap)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    if query.sinks is None:
        return torch.softmax(scores, -1)
    sinks = query.sinks.expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
