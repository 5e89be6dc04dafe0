"""Query rows of a program: loading, the start of their softmax, softcap, storing. Device functions.

A row is one query head of one token; int4 keys and values take its two halves apart.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(q, token_stride, head_stride, tokens, heads, valid, keys, S: tl.constexpr):
    """Whole heads [M, W], twice, or the halves of heads where keys are int4; strides are in units of S.unit."""
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
    """What is added to a row's products [M]."""
    if features.shift is None:
        shift = tl.full((S.rows,), 0.0, tl.float32)
    else:
        shift = tl.load(features.shift + tokens * (S.kv_heads * S.group) + heads, mask=valid, other=0.0)
    return shift


@triton.jit
def start_softmax(features, heads, valid, S: tl.constexpr):
    """Maximum, in powers of 2, and total of rows before the first key; a sink counts once, in the first split."""
    highest = tl.full((S.rows,), float("-inf"), tl.float32)
    total = tl.full((S.rows,), 0.0, tl.float32)
    if features.sinks is not None:
        sinks = tl.load(features.sinks + heads, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        highest = tl.where(tl.program_id(2) == 0, sinks, highest)
        total += (tl.program_id(2) == 0).to(tl.float32)
    return highest, total


@triton.jit
def first_seen(positions, features):
    """The first key position that rows of these positions see."""
    first = positions * 0
    if features.window is not None:
        first = tl.maximum(positions - features.window + 1, 0)
    if features.chunk is not None:
        first = tl.maximum(positions // features.chunk * features.chunk, first)
    return first


@triton.jit
def cap(scores, features):
    """c * tanh(s / c), exact near 0 too, where exp(2x) - 1 would cancel."""
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
