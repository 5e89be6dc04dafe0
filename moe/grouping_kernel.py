"""Groups a pass's choices of experts on the device that computes them, in one launch. Imports Triton.

A program per expert counts all choices, so that no program waits for another, and places its own in the order in which
they were made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..quant.kernels.product import Launch, RowTiles

_CHUNK = 1024


# These change while a job runs: no kernel may be compiled for each.
@triton.jit(do_not_specialize=["num_choices", "num_tiles", "height"])
def group_choices(expert_ids, placed, tiles, totals, num_choices, num_tiles, height, S: tl.constexpr):
    """Grid: (S.experts + 1,); `placed` are token_ids and rows of `Grouped`. The last program clears unused tiles."""
    expert = tl.program_id(0)
    bins = tl.arange(0, S.bins)
    counts = tl.full((S.bins,), 0, tl.int32)
    for start in range(0, num_choices, S.chunk):
        at = start + tl.arange(0, S.chunk)
        # There are more bins than experts.
        ids = tl.load(expert_ids + at, mask=at < num_choices, other=S.bins - 1).to(tl.int32)
        counts += tl.histogram(ids, S.bins)
    before = bins < expert
    row = tl.sum(tl.where(before, counts, 0), 0)
    tile = tl.sum(tl.where(before, (counts + height - 1) // height, 0), 0)
    fields = tl.arange(0, 32)
    if expert == S.experts:
        for start in range(tile * 3, num_tiles * 3, 32):
            tl.store(tiles + start + fields, 0, mask=start + fields < num_tiles * 3)
        tokens = tl.load(totals + S.experts) + num_choices // S.per_token
        passes = tl.load(totals + 2 * S.experts + 1) + 1
        tl.store(totals + S.experts, tokens)
        tl.store(totals + 2 * S.experts + 1, passes)
    else:
        mine = tl.sum(tl.where(bins == expert, counts, 0), 0)
        for start in range(0, mine, 32 * height):
            begin = start + fields * height
            target = tiles + (tile + begin // height) * 3
            tl.store(target, expert, mask=begin < mine)
            tl.store(target + 1, row + begin, mask=begin < mine)
            tl.store(target + 2, row + tl.minimum(begin + height, mine), mask=begin < mine)
        chosen = tl.load(totals + expert) + mine
        passes = tl.load(totals + S.experts + 1 + expert) + (mine > 0).to(tl.int64)
        tl.store(totals + expert, chosen)
        tl.store(totals + S.experts + 1 + expert, passes)
        for start in range(0, num_choices, S.chunk):
            at = start + tl.arange(0, S.chunk)
            ids = tl.load(expert_ids + at, mask=at < num_choices, other=S.bins - 1).to(tl.int32)
            ours = ids == expert
            places = row + tl.cumsum(ours.to(tl.int32), 0) - 1
            tl.store(placed[0] + places, (at // S.per_token).to(tl.int64), mask=ours)
            tl.store(placed[1] + at, places.to(tl.int64), mask=ours)
            row += tl.sum(ours.to(tl.int32), 0)


class GroupingSizes(NamedTuple):
    """What the kernel is compiled for; `bins` are more than `experts`, and `chunk` choices are looked at together."""

    experts: int
    per_token: int
    chunk: int
    bins: int


class Grouped(NamedTuple):
    """Choices sorted by expert: `token_ids` [P] is the token of each row, `rows` [P] the row of choice t * A + a.

    `tiles` has what rows each expert computes, and behind them tiles without rows: how many there are, only the device
    knows.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    tiles: RowTiles

    @classmethod
    def of(cls, expert_ids: torch.Tensor, totals: torch.Tensor, height: int) -> Grouped:
        """Groups expert_ids int64 [T, A], in tiles of `height` rows; launches one kernel and waits for nothing.

        Adds to `totals` int64 [2, E + 1] how many tokens chose each expert, and whether any did; behind them all
        tokens, and one pass.
        """
        tokens, per_token = expert_ids.shape
        count, experts = tokens * per_token, totals.shape[1] - 1
        token_ids, rows = expert_ids.new_empty(2, count).unbind(0)
        num_tiles = min(count, experts) + count // height
        tiles = torch.empty(num_tiles, 3, dtype=torch.int32, device=expert_ids.device)
        sizes = GroupingSizes(experts, per_token, _CHUNK, triton.next_power_of_2(experts + 1))
        arguments = (expert_ids.contiguous(), (token_ids, rows), tiles, totals, count, num_tiles, height, sizes)
        Launch(group_choices, (experts + 1,), arguments).run()
        return cls(token_ids, rows, RowTiles(tiles, height))


@torch.inference_mode()
def wrong_grouping(device: torch.device) -> str:
    """What a device groups otherwise than a stable sort does; "" if nothing. Raises what Triton and CUDA raise."""
    experts, tokens, per_token, height = 20, 300, 4, 16
    expert_ids = torch.arange(tokens * per_token).view(tokens, per_token) * 37 % (experts - 1)
    totals = torch.zeros(2, experts + 1, dtype=torch.int64, device=device)
    grouped = Grouped.of(expert_ids.to(device), totals, height)
    order = expert_ids.view(-1).argsort(stable=True)
    counts = expert_ids.view(-1).bincount(minlength=experts)
    assert grouped.tiles.tiles is not None
    matrix, begin, end = grouped.tiles.tiles.cpu().long().unbind(1)
    rows = torch.zeros(experts, dtype=torch.int64).index_add(0, matrix, end - begin)
    right = (
        torch.equal(grouped.token_ids.cpu(), order // per_token)
        and torch.equal(grouped.rows.cpu()[order], torch.arange(len(order)))
        and torch.equal(rows, counts)
        and torch.equal(totals[:, :-1].cpu(), torch.stack([counts, (counts > 0).long()]))
        and totals[:, -1].tolist() == [tokens, 1]
    )
    return "" if right else f"grouping of {tokens} tokens by expert"
