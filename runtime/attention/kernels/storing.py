"""A Triton kernel that encodes the keys and values of a pass and stores them in their blocks.

It does the arithmetic of `quant.kv.codec`, so that codes, scales and zeros have the same bits.
"""

import triton
import triton.language as tl

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
