"""Keys and values as blocks hold them, and what queries make of them without unpacking: device functions.

An element is code * scale + zero, so a product with a query is scale * (q . code) + zero * sum(q), and a weighted sum
of values is the sum of (p * scale) . code and of p * zero: codes are small integers, exact in every dtype.
"""

import triton
import triton.language as tl


@triton.jit
def locate(table, tokens, live, BLOCK: tl.constexpr):
    """Block ids, 64-bit since blocks * stride exceeds 31 bits, and places in the block of tokens [N]."""
    return tl.load(table + tokens // BLOCK, mask=live, other=0).to(tl.int64), tokens % BLOCK


@triton.jit
def load_codes(side, kv_head, blocks, places, live, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Codes [N, WIDTH] of one head; zeros where not live and beyond COLUMNS."""
    columns = tl.arange(0, WIDTH)
    rows = blocks * side.code_stride + kv_head * (BLOCK * COLUMNS) + places * COLUMNS
    mask = live[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(side.codes + rows[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def load_factors(plane, side, group_row, blocks, places, live, BLOCK: tl.constexpr):
    """Scales or zeros [N] of one group of one head."""
    return tl.load(plane + blocks * side.scale_stride + group_row * BLOCK + places, mask=live, other=0).to(tl.float32)


@triton.jit
def product(a, b, DOT: tl.constexpr):
    """a [M, W] times b [N, W] transposed, in float32."""
    if DOT:
        return tl.dot(a, tl.trans(b), input_precision="ieee")
    return tl.sum(a[:, None, :].to(tl.float32) * b[None, :, :].to(tl.float32), 2)


@triton.jit
def mixture(p, values, DOT: tl.constexpr):
    """p [M, N] times values [N, W], in float32."""
    if DOT:
        return tl.dot(p.to(values.dtype), values, input_precision="ieee")
    return tl.sum(p[:, :, None] * values[None, :, :].to(tl.float32), 1)


@triton.jit
def score(keys, low, high, kv_head, blocks, places, live, S: tl.constexpr):
    """Products [M, N] of queries with stored keys: `low` [M, W] are whole heads, or the lower half where int4."""
    if keys.zeros is None:
        codes = load_codes(keys, kv_head, blocks, places, live, S.head_dim, S.key_width, S.block)
        products = product(low, codes.to(S.dtype), S.dot)
        if keys.scales is not None:
            products *= load_factors(keys.scales, keys, kv_head, blocks, places, live, S.block)[None, :]
    else:
        codes = load_codes(keys, kv_head, blocks, places, live, S.head_dim // 2, S.key_width, S.block)
        products = product(low, (codes & 15).to(S.dtype), S.dot)
        products *= load_factors(keys.scales, keys, kv_head * 2, blocks, places, live, S.block)[None, :]
        zeros = load_factors(keys.zeros, keys, kv_head * 2, blocks, places, live, S.block)
        products += tl.sum(low.to(tl.float32), 1)[:, None] * zeros[None, :]
        upper = product(high, (codes >> 4).to(S.dtype), S.dot)
        products += upper * load_factors(keys.scales, keys, kv_head * 2 + 1, blocks, places, live, S.block)[None, :]
        zeros = load_factors(keys.zeros, keys, kv_head * 2 + 1, blocks, places, live, S.block)
        products += tl.sum(high.to(tl.float32), 1)[:, None] * zeros[None, :]
    return products


@triton.jit
def add_values(values, p, low, high, kv_head, blocks, places, live, S: tl.constexpr):
    """Adds p [M, N] times stored values to the sums `low` [M, W], and `high` where int4."""
    if values.zeros is None:
        codes = load_codes(values, kv_head, blocks, places, live, S.head_dim, S.value_width, S.block)
        if values.scales is not None:
            p *= load_factors(values.scales, values, kv_head, blocks, places, live, S.block)[None, :]
        low += mixture(p, codes.to(S.dtype), S.dot)
    else:
        codes = load_codes(values, kv_head, blocks, places, live, S.head_dim // 2, S.value_width, S.block)
        scales = load_factors(values.scales, values, kv_head * 2, blocks, places, live, S.block)
        zeros = load_factors(values.zeros, values, kv_head * 2, blocks, places, live, S.block)
        low += mixture(p * scales[None, :], (codes & 15).to(S.dtype), S.dot) + tl.sum(p * zeros[None, :], 1)[:, None]
        scales = load_factors(values.scales, values, kv_head * 2 + 1, blocks, places, live, S.block)
        zeros = load_factors(values.zeros, values, kv_head * 2 + 1, blocks, places, live, S.block)
        high += mixture(p * scales[None, :], (codes >> 4).to(S.dtype), S.dot) + tl.sum(p * zeros[None, :], 1)[:, None]
    return low, high
