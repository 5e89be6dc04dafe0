"""Attention of query rows over a paged cache, and the merge of its splits: Triton kernels.

Online softmax after Milakov & Gimelshein 2018 as in FlashAttention (Dao et al. 2022), split over keys as in
Flash-Decoding (Dao et al. 2023). Exponents are of 2, which GPUs compute in one instruction.
"""

import triton
import triton.language as tl

from .pages import add_values, locate, score
from .rows import LOG2_E, cap, first_seen, load_queries, row_shift, start_softmax, store_rows


# What changes while a job runs: Triton would compile a kernel for strides that are multiples of 16 and one for others.
@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def attend_pages(q, target, keys, values, pages, features, token_stride, head_stride, S: tl.constexpr):
    """Grid (tiles, KV heads * programs per group, splits). Strides of q [T, Hq, D] are in units of S.unit.

    Keys are taken in runs that start at multiples of S.keys whatever the tile, so that a row's result has the same
    bits in every chunk that it may come in, as long as there is one split.
    """
    fields = pages.tiles + tl.program_id(0) * 5
    table, origin, first = pages.table + tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    begin, end = tl.load(fields + 3), tl.load(fields + 4)
    SHARES: tl.constexpr = (S.group + S.heads - 1) // S.heads
    kv_head = tl.program_id(1) // SHARES
    rows = tl.arange(0, S.rows)
    heads = tl.program_id(1) % SHARES * S.heads + rows % S.heads
    positions = first + rows // S.heads
    valid = (rows // S.heads < S.rows // S.heads) & (heads < S.group) & (positions >= begin) & (positions < end)
    tokens = (origin + positions).to(tl.int64)
    heads += kv_head * S.group
    low, high = load_queries(q, token_stride, head_stride, tokens, heads, valid, keys, S)
    shift = row_shift(features, tokens, heads, valid, S)
    highest, total = start_softmax(features, heads, valid, S)
    sum_low = tl.full((S.rows, S.value_width), 0.0, tl.float32)
    sum_high = tl.full((S.rows, 1 if values.zeros is None else S.value_width), 0.0, tl.float32)
    last = tl.minimum(first + S.rows // S.heads, end)
    since, run_begin, run_end = key_range(features, tl.maximum(first, begin), last, S)
    for run in range(run_begin, run_end, S.keys):
        key = run + tl.arange(0, S.keys)
        live = (key >= since) & (key < run_end)
        blocks, places = locate(table, key, live, S.block)
        scores = score(keys, low, high, kv_head, blocks, places, live, S)
        scores = cap((scores + shift[:, None]) * features.scale, features) * LOG2_E
        seen = valid[:, None] & live[None, :] & (key[None, :] <= positions[:, None])
        seen &= key[None, :] >= first_seen(positions, features)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # Rows that have seen nothing yet: -inf - -inf is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        highest, total = higher, total * fade + tl.sum(p, 1)
        sum_low, sum_high = add_values(
            values, p, sum_low * fade[:, None], sum_high * fade[:, None], kv_head, blocks, places, live, S
        )
    if target.sums is None:
        # A row that saw nothing, as of an empty sequence, is zeros.
        scale = (1.0 / tl.where(total > 0, total, float("inf")))[:, None]
        row = (tokens * (S.kv_heads * S.group) + heads) * S.head_dim
        store_rows(target.out, row, valid, sum_low * scale, sum_high * scale, values, S)
    else:
        row = tl.program_id(0).to(tl.int64) * (S.kv_heads * S.group) + heads
        row = row * tl.num_programs(2) + tl.program_id(2)
        store_rows(target.sums, row * S.head_dim, valid, sum_low, sum_high, values, S)
        tl.store(target.stats + row * 2, highest, mask=valid)
        tl.store(target.stats + row * 2 + 1, total, mask=valid)


@triton.jit
def key_range(features, first, end, S: tl.constexpr):
    """The first key that rows of positions first to end - 1 see, and the run of keys of this split: [begin, end)."""
    since = first_seen(first, features)
    begin = since // S.keys * S.keys
    runs = tl.cdiv(tl.maximum(end - begin, 0), S.keys)
    share = tl.cdiv(runs, tl.num_programs(2)) * S.keys
    begin += tl.program_id(2) * share
    return since, begin, tl.minimum(begin + share, end)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(target, tiles, num_splits, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Grid (tiles of one token, Hq): the splits' sums, each weighted by how far its maximum lies below the highest."""
    tile, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    splits, columns = tl.arange(0, MOST_SPLITS), tl.arange(0, WIDTH)
    there = splits < num_splits
    row = (tile.to(tl.int64) * num_heads + head) * num_splits
    maxima = tl.load(target.stats + (row + splits) * 2, mask=there, other=float("-inf"))
    highest = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights * tl.load(target.stats + (row + splits) * 2 + 1, mask=there, other=0.0), 0)
    inside = columns < HEAD_DIM
    places = (row + splits)[:, None] * HEAD_DIM + columns[None, :]
    sums = tl.load(target.sums + places, mask=there[:, None] & inside[None, :], other=0.0)
    merged = tl.sum(sums * weights[:, None], 0) / tl.where(total > 0, total, float("inf"))
    token = (tl.load(tiles + tile * 5 + 1) + tl.load(tiles + tile * 5 + 2)).to(tl.int64)
    place = target.out + (token * num_heads + head) * HEAD_DIM + columns
    tl.store(place, merged.to(target.out.dtype.element_ty), mask=inside)
