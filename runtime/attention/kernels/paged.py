"""Triton kernels: storing keys and values in a paged cache, attention of query rows over it, the merge of its splits.

Online softmax after Milakov & Gimelshein 2018 as in FlashAttention (Dao et al. 2022), split over keys as in
Flash-Decoding (Dao et al. 2023). Exponents have base 2, which GPUs compute in one instruction.

It does the arithmetic of `quant.kv.codec`, so that codes, scales and zeros have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(table, tokens, live, BLOCK: tl.constexpr):
    """Block ids and offsets in the block of tokens [N]. Ids are 64-bit, since blocks * stride exceeds 31 bits."""
    return tl.load(table + tokens // BLOCK, mask=live, other=0).to(tl.int64), tokens % BLOCK


@triton.jit
def load_codes(side, kv_head, blocks, offsets, live, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Codes [N, WIDTH] of one head, padded with zeros beyond COLUMNS and where tokens are not live."""
    columns = tl.arange(0, WIDTH)
    rows = blocks * side.code_stride + kv_head * (BLOCK * COLUMNS) + offsets * COLUMNS
    mask = live[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(side.codes + rows[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def load_factors(plane, side, group_row, blocks, offsets, live, BLOCK: tl.constexpr):
    """Scales or zeros [N] of one group of one head."""
    return tl.load(plane + blocks * side.scale_stride + group_row * BLOCK + offsets, mask=live, other=0).to(tl.float32)


@triton.jit
def product(a, b, DOT: tl.constexpr):
    """Multiplies a [M, W] with b [N, W] transposed, in float32."""
    if DOT:
        return tl.dot(a, tl.trans(b), input_precision="ieee")
    return tl.sum(a[:, None, :].to(tl.float32) * b[None, :, :].to(tl.float32), 2)


@triton.jit
def mixture(p, values, DOT: tl.constexpr):
    """Multiplies p [M, N] with values [N, W], in float32."""
    if DOT:
        return tl.dot(p.to(values.dtype), values, input_precision="ieee")
    return tl.sum(p[:, :, None] * values[None, :, :].to(tl.float32), 1)


@triton.jit
def score(keys, low, high, kv_head, blocks, offsets, live, S: tl.constexpr):
    """Products [M, N] of queries with stored keys: `low` [M, W] are whole heads, or their lower halves for int4."""
    if keys.zeros is None:
        codes = load_codes(keys, kv_head, blocks, offsets, live, S.head_dim, S.key_width, S.block)
        products = product(low, codes.to(S.dtype), S.dot)
        if keys.scales is not None:
            products *= load_factors(keys.scales, keys, kv_head, blocks, offsets, live, S.block)[None, :]
    else:
        codes = load_codes(keys, kv_head, blocks, offsets, live, S.head_dim // 2, S.key_width, S.block)
        products = product(low, (codes & 15).to(S.dtype), S.dot)
        products *= load_factors(keys.scales, keys, kv_head * 2, blocks, offsets, live, S.block)[None, :]
        zeros = load_factors(keys.zeros, keys, kv_head * 2, blocks, offsets, live, S.block)
        products += tl.sum(low.to(tl.float32), 1)[:, None] * zeros[None, :]
        upper = product(high, (codes >> 4).to(S.dtype), S.dot)
        products += upper * load_factors(keys.scales, keys, kv_head * 2 + 1, blocks, offsets, live, S.block)[None, :]
        zeros = load_factors(keys.zeros, keys, kv_head * 2 + 1, blocks, offsets, live, S.block)
        products += tl.sum(high.to(tl.float32), 1)[:, None] * zeros[None, :]
    return products


@triton.jit
def add_values(values, p, low, high, kv_head, blocks, offsets, live, S: tl.constexpr):
    """Adds p [M, N] times stored values to the sums `low` [M, W], and to `high` for int4."""
    if values.zeros is None:
        codes = load_codes(values, kv_head, blocks, offsets, live, S.head_dim, S.value_width, S.block)
        if values.scales is not None:
            p *= load_factors(values.scales, values, kv_head, blocks, offsets, live, S.block)[None, :]
        low += mixture(p, codes.to(S.dtype), S.dot)
    else:
        codes = load_codes(values, kv_head, blocks, offsets, live, S.head_dim // 2, S.value_width, S.block)
        scales = load_factors(values.scales, values, kv_head * 2, blocks, offsets, live, S.block)
        zeros = load_factors(values.zeros, values, kv_head * 2, blocks, offsets, live, S.block)
        low += mixture(p * scales[None, :], (codes & 15).to(S.dtype), S.dot) + tl.sum(p * zeros[None, :], 1)[:, None]
        scales = load_factors(values.scales, values, kv_head * 2 + 1, blocks, offsets, live, S.block)
        zeros = load_factors(values.zeros, values, kv_head * 2 + 1, blocks, offsets, live, S.block)
        high += mixture(p * scales[None, :], (codes >> 4).to(S.dtype), S.dot) + tl.sum(p * zeros[None, :], 1)[:, None]
    return low, high


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(q, token_stride, head_stride, tokens, heads, valid, keys, S: tl.constexpr):
    """Whole heads [M, W], twice, or the two halves of heads where keys are int4; strides are in units of S.unit."""
    row = ((tokens * token_stride + heads * head_stride) * S.unit)[:, None]
    columns = tl.arange(0, S.key_width)[None, :]
    COLUMNS: tl.constexpr = S.head_dim if keys.zeros is None else S.head_dim // 2
    inside = valid[:, None] & (columns < COLUMNS)
    low = tl.load(q + row + columns, mask=inside, other=0).to(S.dtype)
    if keys.zeros is None:
        high = low
    else:
        high = tl.load(q + row + COLUMNS + columns, mask=inside, other=0).to(S.dtype)
    return low, high


@triton.jit
def row_shift(features, tokens, heads, valid, S: tl.constexpr):
    """The shifts [M] that are added to the rows' products."""
    if features.shift is None:
        shift = tl.full((S.rows,), 0.0, tl.float32)
    else:
        shift = tl.load(features.shift + tokens * (S.kv_heads * S.group) + heads, mask=valid, other=0.0)
    return shift


@triton.jit
def start_softmax(features, heads, valid, S: tl.constexpr):
    """Initial maximum (a log2) and total of rows; a sink counts once, in the first split."""
    highest = tl.full((S.rows,), float("-inf"), tl.float32)
    total = tl.full((S.rows,), 0.0, tl.float32)
    if features.sinks is not None:
        sinks = tl.load(features.sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.where(tl.program_id(2) == 0, sinks, highest)
        total += (tl.program_id(2) == 0).to(tl.float32)
    return highest, total


@triton.jit
def first_visible(positions, features):
    """The first key position that rows of these positions attend to."""
    first = positions * 0
    if features.window is not None:
        first = tl.maximum(positions - features.window + 1, 0)
    if features.chunk is not None:
        first = tl.maximum(positions // features.chunk * features.chunk, first)
    return first


@triton.jit
def cap(scores, features):
    """c * tanh(s / c), accurate near 0 too, where exp(2x) - 1 would cancel."""
    if features.softcap is None:
        capped = scores
    else:
        x = scores / features.softcap
        size = tl.abs(x)
        square = x * x
        series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        decay = tl.exp(-2 * size)
        far = tl.where(x < 0, -1.0, 1.0) * (1 - decay) / (1 + decay)
        capped = features.softcap * tl.where(size < 0.3, x * series, far)
    return capped


@triton.jit
def store_rows(target, row, valid, low, high, values, S: tl.constexpr):
    """Writes heads of sums at elements `row` [M] of `target`."""
    columns = tl.arange(0, S.value_width)[None, :]
    COLUMNS: tl.constexpr = S.head_dim if values.zeros is None else S.head_dim // 2
    inside = valid[:, None] & (columns < COLUMNS)
    dtype = target.dtype.element_ty
    tl.store(target + row[:, None] + columns, low.to(dtype), mask=inside)
    if values.zeros is not None:
        tl.store(target + row[:, None] + COLUMNS + columns, high.to(dtype), mask=inside)


# Strides change while a job runs: Triton would compile one kernel for multiples of 16 and one for other strides.
@triton.jit(do_not_specialize=["token_stride", "head_stride"])
def attend_pages(q, target, keys, values, pages, features, token_stride, head_stride, S: tl.constexpr):
    """Grid (tiles, KV heads * programs per group, splits). Strides of q [T, Hq, D] are in units of S.unit.

    Keys are read in runs that start at multiples of S.keys in every tile, so that the bits of a row's result do not
    depend on its chunk, as long as there is one split.
    """
    fields = pages.tiles + tl.program_id(0) * 5
    table, origin, first = pages.table + tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    begin, end = tl.load(fields + 3), tl.load(fields + 4)
    PROGRAMS: tl.constexpr = (S.group + S.heads - 1) // S.heads
    kv_head = tl.program_id(1) // PROGRAMS
    rows = tl.arange(0, S.rows)
    heads = tl.program_id(1) % PROGRAMS * S.heads + rows % S.heads
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
    first_key, run_begin, run_end = key_range(features, tl.maximum(first, begin), last, S)
    for run in range(run_begin, run_end, S.keys):
        key = run + tl.arange(0, S.keys)
        live = (key >= first_key) & (key < run_end)
        blocks, offsets = locate(table, key, live, S.block)
        scores = score(keys, low, high, kv_head, blocks, offsets, live, S)
        scores = cap((scores + shift[:, None]) * features.scale, features) * LOG2_E
        visible = valid[:, None] & live[None, :] & (key[None, :] <= positions[:, None])
        visible &= key[None, :] >= first_visible(positions, features)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # Rows without any visible key so far: -inf - -inf is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(highest - base)
        highest, total = higher, total * fade + tl.sum(p, 1)
        sum_low, sum_high = add_values(
            values, p, sum_low * fade[:, None], sum_high * fade[:, None], kv_head, blocks, offsets, live, S
        )
    if target.sums is None:
        # A row without any visible key, as of an empty sequence, is zeros.
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
    """The first key that rows of positions first to end - 1 attend to, and the keys [begin, end) of this split."""
    first_key = first_visible(first, features)
    begin = first_key // S.keys * S.keys
    runs = tl.cdiv(tl.maximum(end - begin, 0), S.keys)
    split_keys = tl.cdiv(runs, tl.num_programs(2)) * S.keys
    begin += tl.program_id(2) * split_keys
    return first_key, begin, tl.minimum(begin + split_keys, end)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(target, tiles, num_splits, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Grid (tiles of one token, Hq): adds the splits' sums, each weighted by 2^(its maximum - the highest)."""
    tile, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    splits, columns = tl.arange(0, MAX_SPLITS), tl.arange(0, WIDTH)
    valid = splits < num_splits
    row = (tile.to(tl.int64) * num_heads + head) * num_splits
    maxima = tl.load(target.stats + (row + splits) * 2, mask=valid, other=float("-inf"))
    highest = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights * tl.load(target.stats + (row + splits) * 2 + 1, mask=valid, other=0.0), 0)
    inside = columns < HEAD_DIM
    elements = (row + splits)[:, None] * HEAD_DIM + columns[None, :]
    sums = tl.load(target.sums + elements, mask=valid[:, None] & inside[None, :], other=0.0)
    merged = tl.sum(sums * weights[:, None], 0) / tl.where(total > 0, total, float("inf"))
    token = (tl.load(tiles + tile * 5 + 1) + tl.load(tiles + tile * 5 + 2)).to(tl.int64)
    outputs = target.out + (token * num_heads + head) * HEAD_DIM + columns
    tl.store(outputs, merged.to(target.out.dtype.element_ty), mask=inside)


SMALLEST_SCALE = tl.constexpr(2.0**-17)


# These may change while a job runs: no kernel may be compiled for each value.
@triton.jit(do_not_specialize=["num_tokens", "token_stride", "head_stride"])
def store_tokens(k, v, keys, values, slots, num_tokens, token_stride, head_stride, S: tl.constexpr):
    """Grid (runs of S.tokens tokens, KV heads). Token t goes to offset slots[t] % block of block slots[t] // block;
    tokens with a negative slot are skipped. k and v [T, H, D] have the same strides, in units of S.unit.
    """
    tokens = tl.program_id(0) * S.tokens + tl.arange(0, S.tokens)
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1)
    live = slot >= 0
    blocks, offsets = slot // S.block, slot % S.block
    head = tl.program_id(1)
    rows = (tokens.to(tl.int64) * token_stride + head * head_stride) * S.unit
    store_side(k, rows, keys, head, blocks, offsets, live, S)
    store_side(v, rows, values, head, blocks, offsets, live, S)


@triton.jit
def store_side(x, rows, side, kv_head, blocks, offsets, live, S: tl.constexpr):
    """Encodes and stores the heads that begin at elements `rows` [N] of x."""
    if side.zeros is None:
        columns = tl.arange(0, S.width)[None, :]
        inside = live[:, None] & (columns < S.head_dim)
        elements = tl.load(x + rows[:, None] + columns, mask=inside, other=0)
        if side.scales is None:
            codes = elements.to(side.codes.dtype.element_ty)
        else:
            codes = code_int8(elements.to(tl.float32), side, kv_head, blocks, offsets, live, S)
        target = blocks * side.code_stride + (kv_head * S.block + offsets) * S.head_dim
        tl.store(side.codes + target[:, None] + columns, codes, mask=inside)
    else:
        HALF: tl.constexpr = S.head_dim // 2
        columns = tl.arange(0, S.half_width)[None, :]
        inside = live[:, None] & (columns < HALF)
        low = code_int4(x + rows[:, None] + columns, side, kv_head * 2, blocks, offsets, live, inside, S)
        upper = x + rows[:, None] + HALF + columns
        high = code_int4(upper, side, kv_head * 2 + 1, blocks, offsets, live, inside, S)
        target = blocks * side.code_stride + (kv_head * S.block + offsets) * HALF
        tl.store(side.codes + target[:, None] + columns, low | (high << 4), mask=inside)


@triton.jit
def code_int8(x, side, kv_head, blocks, offsets, live, S: tl.constexpr):
    """Codes of heads [N, W], padded with zeros; stores their scales."""
    scales = round_scale(tl.max(tl.abs(x), 1), 127.0, x)
    group = blocks * side.scale_stride + kv_head * S.block + offsets
    tl.store(side.scales + group, scales, mask=live)
    codes = tl.floor(tl.div_rn(x, scales.to(tl.float32)[:, None]) + 0.5)
    return tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)


@triton.jit
def code_int4(source, side, group_row, blocks, offsets, live, inside, S: tl.constexpr):
    """Codes of halves of heads [N, W] as uint8; stores their scales and zeros."""
    x = tl.load(source, mask=inside, other=0).to(tl.float32)
    lowest = tl.min(tl.where(inside, x, float("inf")), 1)
    highest = tl.max(tl.where(inside, x, float("-inf")), 1)
    zeros = lowest.to(tl.float16)
    wide = zeros.to(tl.float32)
    scales = round_scale(highest - wide, 15.0, x)
    group = blocks * side.scale_stride + group_row * S.block + offsets
    tl.store(side.scales + group, scales, mask=live)
    tl.store(side.zeros + group, zeros, mask=live)
    codes = tl.floor(tl.div_rn(x - wide[:, None], scales.to(tl.float32)[:, None]) + 0.5)
    return tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.uint8)


@triton.jit
def round_scale(spread, steps, x):
    """spread / steps as float16; NaN where a row of x [N, W] is not finite, because its codes would look valid."""
    scales = tl.maximum(tl.div_rn(spread, tl.zeros_like(spread) + steps), SMALLEST_SCALE)
    strange = tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, 1)
    return tl.where(strange == 0, scales, float("nan")).to(tl.float16)
