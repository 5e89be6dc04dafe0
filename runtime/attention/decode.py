"""One new token of one sequence over the cache: the operation that a batch job spends most of its attention on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...quant.kv_codec import Coded
from ..kv.pool import take_blocks
from .codes import CodeScratch, Stored, scores, weighted_sum
from .limits import NATIVE_NBYTES, WIDE_NUMEL
from .protocol import AttentionCall


@dataclass(frozen=True, slots=True)
class Visible:
    """What a token sees: positions `low` to `high` of the sequence, in blocks that begin at position `first`."""

    block_ids: torch.Tensor
    first: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Query:
    """One token's queries [H, G, D] of H KV heads, G heads each, as they meet stored keys.

    `shift` [H, G, 1], scaled, is what scores lack (`KeyFrame.shifts`); None where it does not matter.
    """

    call: AttentionCall
    q: torch.Tensor
    shift: torch.Tensor | None
    sinks: torch.Tensor | None


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


def decode(query: Query, keys: Stored, values: Stored, seen: Visible, scratch: DecodeScratch) -> torch.Tensor:
    """[H, G, D] in float32 or the arithmetic's dtype."""
    if query.call.softcap is None and query.sinks is None:
        room = scratch.native(keys, values, len(seen.block_ids))
        if room is not None:
            return _decode_native(query, keys, values, seen, room)
    return _decode_codes(query, keys, values, seen, scratch.codes)


def _decode_native(query: Query, keys: Stored, values: Stored, seen: Visible, room: torch.Tensor) -> torch.Tensor:
    for stored, part in zip((keys, values), room, strict=True):
        take_blocks(stored.planes.codes, seen.block_ids, part)
    visible = room.flatten(2, 3)[:, :, seen.low - seen.first : seen.high - seen.first].unsqueeze(1)
    q = query.q.unsqueeze(0)
    return F.scaled_dot_product_attention(q, visible[0], visible[1], scale=query.call.scale).squeeze(0)


def _decode_codes(query: Query, keys: Stored, values: Stored, seen: Visible, scratch: CodeScratch) -> torch.Tensor:
    """In runs of blocks: scores of all keys first, which are few numbers, then the values."""
    heads, group, dim = query.q.shape
    block = keys.planes.codes.shape[2]
    run = scratch.numel // (heads * block * dim)
    q = query.q.float() * query.call.scale
    runs = [
        (block_ids, _part(seen, index * run * block, len(block_ids) * block))
        for index, block_ids in enumerate(torch.split(seen.block_ids, run))
    ]
    found = [scores(q, _cut(scratch.gather(keys, block_ids), part), keys.format, scratch) for block_ids, part in runs]
    p = probabilities(query, torch.cat(found, -1))
    out = q.new_zeros(heads, group, dim)
    for block_ids, part in runs:
        count = part.stop - part.start
        gathered = _cut(scratch.gather(values, block_ids), part)
        out += weighted_sum(p[..., :count], gathered, values.format, scratch)
        p = p[..., count:]
    return out


def probabilities(query: Query, scores: torch.Tensor) -> torch.Tensor:
    """softmax of scores [H, G, C], which may be overwritten, with everything that the call asks for."""
    if query.shift is not None:
        scores += query.shift
    if query.call.softcap is not None:
        scores.div_(query.call.softcap).tanh_().mul_(query.call.softcap)
    if query.sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat([scores, query.sinks], -1), -1)[..., :-1]


def _part(seen: Visible, offset: int, count: int) -> slice:
    """Which of `count` keys, the first at position `seen.first + offset`, are visible."""
    begin = seen.first + offset
    return slice(max(seen.low - begin, 0), min(seen.high - begin, count))


def _cut(coded: Coded, part: slice) -> Coded:
    """What lies outside may be anything, NaN too."""
    scales, zeros = (None if plane is None else plane[..., part] for plane in (coded.scales, coded.zeros))
    return Coded(coded.codes[:, part], scales, zeros)
