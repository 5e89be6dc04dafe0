"""Triton kernels: storing keys and values in a paged cache, attention of query rows over it, the merge of its splits.

Online softmax after Milakov & Gimelshein 2018 as in FlashAttention (Dao et al. 2022), split over keys as in
Flash-Decoding (Dao et al. 2023). Exponents have base 2, which GPUs compute in one instruction.

It does the arithmetic of `quant.kv.codec`, so that codes, scales and zeros have the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....quant.kernels.decode import OFFSET_INT4, OFFSET_INT8, half_int4, half_int8

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def locate(table, run, span, S: tl.constexpr):
    """The blocks int64 [S.parts, 1] that hold the keys from `run` on, and where in them these are [S.parts, keys each].

    Ids are 64-bit, since blocks * stride exceeds 31 bits.
    """
    PER: tl.constexpr = S.keys // S.parts
    first = run + tl.arange(0, S.parts) * PER
    offsets = (first % S.block * (S.block != PER))[:, None] + tl.arange(0, PER)[None, :]
    live = (first >= span[0] - (PER - 1)) & (first < span[1])
    return tl.load(table + first // S.block, mask=live, other=0).to(tl.int64)[:, None], offsets


@triton.jit
def load_codes(
    side, kv_head, place, live, BEGIN: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr
):
    """Elements [S.keys, WIDTH] of one head from BEGIN on, padded with zeros beyond the COLUMNS that a head has.

    Native ones of keys that are not live are zeros, codes any: their factors are zeros.
    """
    blocks, offsets = place
    rows = side.codes + (blocks * side.code_stride + kv_head * (S.block * COLUMNS)) + offsets * COLUMNS
    columns = BEGIN + tl.arange(0, WIDTH)[None, :]
    live = tl.reshape(live, rows.shape)
    if S.parts < S.keys:
        rows, live, columns = rows[:, :, None], live[:, :, None], columns[None, :, :]
    pointers = rows + columns
    if side.scales is None:
        mask = live & (columns < COLUMNS)
        codes = tl.load(pointers, mask=mask, other=0)
    elif BEGIN + WIDTH > COLUMNS:
        codes = tl.load(pointers, mask=columns < COLUMNS, other=0)
    else:
        codes = tl.load(pointers)
    return tl.reshape(codes, (S.keys, WIDTH))


@triton.jit
def load_factors(plane, side, group_row, place, live, S: tl.constexpr):
    """Scales or zeros [S.keys] of one group of one head; 0 where keys are not live."""
    blocks, offsets = place
    pointers = plane + (blocks * side.scale_stride + group_row * S.block) + offsets
    factors = tl.load(pointers, mask=tl.reshape(live, pointers.shape), other=0)
    return tl.reshape(factors, (S.keys,)).to(tl.float32)


@triton.jit
def product(a, b, sums, S: tl.constexpr):
    """`sums` plus a [M, W] times b [N, W] transposed, in float32."""
    if not S.dot:
        sums += tl.sum(a[:, None, :].to(tl.float32) * b[None, :, :].to(tl.float32), 2)
    elif S.turned:
        sums = tl.trans(tl.dot(b, tl.trans(a), tl.trans(sums), input_precision="ieee"))
    else:
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    return sums


@triton.jit
def mixture(p, values, sums, S: tl.constexpr):
    """`sums` plus p [M, N] times values [N, W], in float32."""
    if not S.dot:
        sums += tl.sum(p[:, :, None] * values[None, :, :].to(tl.float32), 1)
    elif S.turned:
        p = tl.trans(p.to(values.dtype))
        sums = tl.trans(tl.dot(tl.trans(values), p, tl.trans(sums), input_precision="ieee"))
    else:
        sums = tl.dot(p.to(values.dtype), values, sums, input_precision="ieee")
    return sums


@triton.jit
def numbers(side, codes, OFFSET: tl.constexpr, S: tl.constexpr):
    """Native elements, or codes of 8 bits."""
    return codes.to(S.dtype) if side.scales is None else half_int8(codes, S.code_type, OFFSET)


@triton.jit
def score(keys, queries, kv_head, place, live, S: tl.constexpr):
    """Products [M, N] of queries, in units of their sizes, with stored keys."""
    low, rest, low_sum = queries[0]
    high, high_rest, high_sum = queries[1]
    products = tl.full((S.rows, S.keys), 0.0, tl.float32)
    if keys.zeros is None:
        if keys.scales is not None and S.code_type == tl.float16:
            products -= (low_sum * OFFSET_INT8)[:, None]
        codes = load_codes(keys, kv_head, place, live, 0, S.head_dim, S.key_width, S)
        products = product(low, numbers(keys, codes, True, S), products, S)
        if S.key_rest > 0:
            codes = load_codes(keys, kv_head, place, live, S.key_width, S.head_dim, S.key_rest, S)
            products = product(rest, numbers(keys, codes, True, S), products, S)
        if keys.scales is not None:
            products *= load_factors(keys.scales, keys, kv_head, place, live, S)[None, :]
    else:
        codes = load_codes(keys, kv_head, place, live, 0, S.head_dim // 2, S.key_width, S)
        first, second = half_int4(codes, S.code_type, True)
        lower, upper = product(low, first, products, S), product(high, second, products, S)
        if S.key_rest > 0:
            codes = load_codes(keys, kv_head, place, live, S.key_width, S.head_dim // 2, S.key_rest, S)
            first, second = half_int4(codes, S.code_type, True)
            lower, upper = product(rest, first, lower, S), product(high_rest, second, upper, S)
        scales, zeros = load_int4_factors(keys, kv_head * 2, place, live, S)
        lower = lower * scales[None, :] + low_sum[:, None] * zeros[None, :]
        scales, zeros = load_int4_factors(keys, kv_head * 2 + 1, place, live, S)
        products = upper * scales[None, :] + (high_sum[:, None] * zeros[None, :] + lower)
    return products


@triton.jit
def load_int4_factors(keys, group_row, place, live, S: tl.constexpr):
    """Scales [N], and zeros less what codes are more by."""
    MORE: tl.constexpr = OFFSET_INT4 if S.code_type == tl.float16 else 0
    scales = load_factors(keys.scales, keys, group_row, place, live, S)
    return scales, load_factors(keys.zeros, keys, group_row, place, live, S) - MORE * scales


@triton.jit
def load_value_factors(values, kv_head, place, live, S: tl.constexpr):
    """Scales and zeros [N] of both halves of int4 values, twice the scales of int8; and units, 1 / units.

    Units are the scales, of int4 the larger ones of both halves. Probabilities times units are what float16 can hold:
    beside the largest such product, what it cannot hold adds nothing.
    """
    units = tl.full((S.keys,), 1.0, tl.float32)
    inverse, scales, zeros, high_scales, high_zeros = units, units, units, units, units
    if values.zeros is not None:
        scales = load_factors(values.scales, values, kv_head * 2, place, live, S)
        zeros = load_factors(values.zeros, values, kv_head * 2, place, live, S)
        high_scales = load_factors(values.scales, values, kv_head * 2 + 1, place, live, S)
        high_zeros = load_factors(values.zeros, values, kv_head * 2 + 1, place, live, S)
    elif values.scales is not None:
        scales = load_factors(values.scales, values, kv_head, place, live, S)
        high_scales = scales
    if values.scales is not None and S.code_type == tl.float16:
        units = tl.where(live, tl.maximum(scales, high_scales), 1.0)
        inverse = invert(units)
    return (scales, zeros, high_scales, high_zeros), units, inverse


@triton.jit
def no_columns(S: tl.constexpr):
    """What `add_columns` begins with: [M, 1], or [M, S.partial / 8, 8]."""
    if S.turned:
        sums = tl.full((S.rows, S.partial // 8, 8), 0.0, tl.float32)
    else:
        sums = tl.full((S.rows, S.partial), 0.0, tl.float32)
    return sums


@triton.jit
def add_columns(sums, fade, x, S: tl.constexpr):
    """`sums` times fade [M, 1] plus x [M, N] summed over the columns that a thread has, so that none waits for others:
    of 16 neighbours, which are rows of a product, two that are 8 apart, and every warp's next ones."""
    if S.turned:
        pairs = tl.reshape(x, (S.rows, S.keys // 2 // S.partial, S.partial // 8, 2, 8))
        sums = sums * fade[:, :, None] + tl.sum(tl.sum(pairs, 3), 1)
    else:
        sums = sums * fade + tl.sum(tl.reshape(x, (S.rows, S.keys // S.partial, S.partial)), 1)
    return sums


@triton.jit
def all_columns(sums, S: tl.constexpr):
    """Sums [M] of all columns."""
    if S.turned:
        sums = tl.sum(sums, 2)
    return tl.sum(sums, 1)


@triton.jit
def add_values(values, p, factors, halves, fade, kv_head, place, live, S: tl.constexpr):
    """The sums of both parts [M, W] of both halves, times `fade` [M, 1], plus p [M, N] times stored values; and
    `add_columns` of p times their zeros. Of int8 values, p is in units."""
    scales, zeros, high_scales, high_zeros = factors
    low, rest, low_added = halves[0]
    high, high_rest, high_added = halves[1]
    if values.zeros is None:
        if S.code_type == tl.float32:
            p *= scales[None, :]
        codes = load_codes(values, kv_head, place, live, 0, S.head_dim, S.value_width, S)
        low = mixture(p, numbers(values, codes, False, S), low * fade, S)
        if S.value_rest > 0:
            codes = load_codes(values, kv_head, place, live, S.value_width, S.head_dim, S.value_rest, S)
            rest = mixture(p, numbers(values, codes, False, S), rest * fade, S)
    else:
        codes = load_codes(values, kv_head, place, live, 0, S.head_dim // 2, S.value_width, S)
        first, second = half_int4(codes, S.code_type, False)
        low_added = add_columns(low_added, fade, p * zeros[None, :], S)
        low = mixture(p * scales[None, :], first, low * fade, S)
        high_added = add_columns(high_added, fade, p * high_zeros[None, :], S)
        high = mixture(p * high_scales[None, :], second, high * fade, S)
        if S.value_rest > 0:
            codes = load_codes(values, kv_head, place, live, S.value_width, S.head_dim // 2, S.value_rest, S)
            first, second = half_int4(codes, S.code_type, False)
            rest = mixture(p * scales[None, :], first, rest * fade, S)
            high_rest = mixture(p * high_scales[None, :], second, high_rest * fade, S)
    return (low, rest, low_added), (high, high_rest, high_added)


@triton.jit
def logarithm(x):
    """The logarithm to base 2 in one instruction."""
    if INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


@triton.jit
def invert(x):
    """1 / x in one instruction."""
    if INTERPRETED:
        result = 1.0 / x
    else:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_half(q, row, valid, COLUMNS: tl.constexpr, S: tl.constexpr):
    """The two parts [M, W] of a head or of half of it in float32; the second may be empty."""
    columns = tl.arange(0, S.key_width)[None, :]
    low = tl.load(q + row[:, None] + columns, mask=valid[:, None] & (columns < COLUMNS), other=0).to(tl.float32)
    rest = tl.full((S.rows, 1), 0.0, tl.float32)
    if S.key_rest > 0:
        columns = S.key_width + tl.arange(0, S.key_rest)[None, :]
        rest = tl.load(q + row[:, None] + columns, mask=valid[:, None] & (columns < COLUMNS), other=0).to(tl.float32)
    return low, rest


@triton.jit
def load_queries(q, row, valid, keys, S: tl.constexpr):
    """Both halves of the heads [M, W] at elements `row` of q, of which the second is for int4: each is two parts and
    their sum. And the sizes [M] which all of these are divided by: 1 for native keys.
    """
    COLUMNS: tl.constexpr = S.head_dim if keys.zeros is None else S.head_dim // 2
    low, rest = load_half(q, row, valid, COLUMNS, S)
    high, high_rest = low, rest
    if keys.zeros is not None:
        high, high_rest = load_half(q + COLUMNS, row, valid, COLUMNS, S)
    sizes = tl.full((S.rows,), 1.0, tl.float32)
    if keys.scales is not None:
        # float16 has the digits for products with codes, but not the range.
        sizes = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(rest), 1))
        sizes = tl.maximum(tl.maximum(tl.max(tl.abs(high), 1), tl.max(tl.abs(high_rest), 1)), sizes)
        sizes = tl.where(sizes > 0, sizes, 1.0)
    return (in_sizes(low, rest, sizes, keys, S), in_sizes(high, high_rest, sizes, keys, S)), sizes


@triton.jit
def in_sizes(low, rest, sizes, keys, S: tl.constexpr):
    """Both parts over the sizes as products take them, and their sum [M]."""
    DTYPE: tl.constexpr = S.dtype if keys.scales is None else S.code_type
    low, rest = (low / sizes[:, None]).to(DTYPE), (rest / sizes[:, None]).to(DTYPE)
    return low, rest, tl.sum(low.to(tl.float32), 1) + tl.sum(rest.to(tl.float32), 1)


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
    """The initial state of rows: maximum (a log2), `add_columns` of the total, sums of both parts of both halves,
    `add_columns` of what is added to each half. A sink counts once, in the first split."""
    highest = tl.full((S.rows,), float("-inf"), tl.float32)
    none = no_columns(S)
    total = none
    if features.sinks is not None:
        sinks = tl.load(features.sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.where(tl.program_id(2) == 0, sinks, highest)
        first = ((tl.program_id(2) == 0) & (tl.arange(0, S.partial) == 0)).to(tl.float32)[None, :]
        total += tl.reshape(first, (1, S.partial // 8, 8)) if S.turned else first
    low = tl.full((S.rows, S.value_width), 0.0, tl.float32)
    rest = tl.full((S.rows, S.value_rest if S.value_rest > 0 else 1), 0.0, tl.float32)
    return highest, total, low, rest, none, low, rest, none


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
def store_half(target, row, valid, low, rest, added, scale, COLUMNS: tl.constexpr, S: tl.constexpr):
    """Writes the sums of both parts of a half, and what is added to them, times `scale` [M] at elements `row` [M]."""
    columns = tl.arange(0, S.value_width)[None, :]
    dtype = target.dtype.element_ty
    more = all_columns(added, S)[:, None]
    inside = valid[:, None] & (columns < COLUMNS)
    tl.store(target + row[:, None] + columns, ((low + more) * scale[:, None]).to(dtype), mask=inside)
    if S.value_rest > 0:
        columns = S.value_width + tl.arange(0, S.value_rest)[None, :]
        inside = valid[:, None] & (columns < COLUMNS)
        tl.store(target + row[:, None] + columns, ((rest + more) * scale[:, None]).to(dtype), mask=inside)


@triton.jit
def store_rows(target, row, valid, state, scale, values, S: tl.constexpr):
    """Writes the heads of a state's sums times `scale` [M] at elements `row` [M] of `target`."""
    _highest, _total, low, rest, low_added, high, high_rest, high_added = state
    COLUMNS: tl.constexpr = S.head_dim if values.zeros is None else S.head_dim // 2
    store_half(target, row, valid, low, rest, low_added, scale, COLUMNS, S)
    if values.zeros is not None:
        store_half(target + COLUMNS, row, valid, high, high_rest, high_added, scale, COLUMNS, S)


@triton.jit
def attend_run(stored, kv_head, run, span, asked, features, state, S: tl.constexpr):
    """`state` after the S.keys keys from `run` on, of which those in `span` are live."""
    keys, values, table = stored
    queries, sizes, shift, positions = asked
    highest, total, low, rest, low_added, high, high_rest, high_added = state
    key = run + tl.arange(0, S.keys)
    live = (key >= span[0]) & (key < span[1])
    place = locate(table, run, span, S)
    factors, units, inverse = load_value_factors(values, kv_head, place, live, S)
    # Exponents are raised, so that powers of two are probabilities times units.
    raised = logarithm(units)
    scores = score(keys, queries, kv_head, place, live, S) * sizes[:, None]
    if features.softcap is not None or features.shift is not None:
        scores = cap((scores + shift[:, None]) * features.scale, features) * LOG2_E
    if S.turned:
        # All rows are of one token: none but keys beyond its position are hidden.
        scores += tl.where(live, raised, float("-inf"))[None, :]
    else:
        scores += raised[None, :]
        visible = live[None, :] & (key[None, :] <= positions[:, None])
        visible &= key[None, :] >= first_visible(positions, features)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    # Rows without any visible key so far: -inf - -inf is NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    in_units = tl.exp2(scores - base[:, None])
    p = in_units * inverse[None, :]
    fade = tl.exp2(highest - base)[:, None]
    total = add_columns(total, fade, p, S)
    halves = ((low, rest, low_added), (high, high_rest, high_added))
    # Scales of int8 are the units.
    p = in_units if values.zeros is None else p
    low, high = add_values(values, p, factors, halves, fade, kv_head, place, live, S)
    return higher, total, low[0], low[1], low[2], high[0], high[1], high[2]


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
    queries, sizes = load_queries(q, (tokens * token_stride + heads * head_stride) * S.unit, valid, keys, S)
    if features.softcap is None and features.shift is None:
        sizes *= features.scale * LOG2_E
    asked = (queries, sizes, row_shift(features, tokens, heads, valid, S), positions)
    last = tl.minimum(first + S.rows // S.heads, end)
    first_key, run_begin, run_end = key_range(features, tl.maximum(first, begin), last, S)
    state = start_softmax(features, heads, valid, S)
    for run in range(run_begin, run_end, S.keys):
        state = attend_run((keys, values, table), kv_head, run, (first_key, run_end), asked, features, state, S)
    total = all_columns(state[1], S)
    if target.sums is None:
        # A row without any visible key, as of an empty sequence, is zeros.
        scale = 1.0 / tl.where(total > 0, total, float("inf"))
        row = (tokens * (S.kv_heads * S.group) + heads) * S.head_dim
        store_rows(target.out, row, valid, state, scale, values, S)
    else:
        row = tl.program_id(0).to(tl.int64) * (S.kv_heads * S.group) + heads
        row = row * tl.num_programs(2) + tl.program_id(2)
        store_rows(target.sums, row * S.head_dim, valid, state, tl.full((S.rows,), 1.0, tl.float32), values, S)
        tl.store(target.stats + row * 2, state[0], mask=valid)
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
