"""Draws the tokens of rows on the device that has their logits, in one launch. Imports Triton.

A program draws one row, and sorts nothing: what the sampler asks of a row's ranks (the k-th token, the end of the
nucleus, the token that is drawn) is always the first rank at which a sum over the ranks up to it reaches a bound. The
sum grows with the distance from the peak, whose bits are searched, first over the whole row and then among the tokens
between which it must be; the id decides among tokens of one distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...quant.kernels.product import Launch
from ...quant.kernels.upload import upload
from .draw import NO_TOKEN
from .sampler import SamplerColumns, choose, unit

# Triton's functions read no other globals.
_INFINITY = tl.constexpr(0x7F800000)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_WARPS = 16


class RowSizes(NamedTuple):
    """What the kernel is compiled for: bounds that are tried at once, tokens that are looked at together, and the times
    that the whole row is summed before what is left is gathered.
    """

    tried: int
    chunk: int
    rounds: int = 4


SIZES = RowSizes(4, 4096)
# Of the rows that are tried before a plan: two chunks, the last of them not full.
VOCAB = 5003


@triton.jit
def _distances(row, at):
    """From the peak, infinite behind the row's end. `row` is where its logits are, how many they are, and the peak."""
    logits = tl.load(row[0] + at, mask=at < row[1], other=-float("inf")).to(tl.float32)
    return row[2] - logits


@triton.jit
def _weights(distances, scale):
    """`sampler.weights` as int64, 0 where min-p drops the token. `scale` is -1 / temperature, `unit`, and the least
    weight that is kept.
    """
    each = tl.exp(distances * scale[0]) * scale[1]
    # Rounds to even: where a float32 may have a fraction, this sum has none.
    each = tl.where(each < 8388608.0, (each + 8388608.0) - 8388608.0, each).to(tl.int64)
    return tl.where(each >= scale[2], each, 0)


@triton.jit
def _narrow(low, high, before, tried, total, bound):
    """Of what is tried between low and high, with the sum up to each, what is left, and the sum before it."""
    short = total < bound
    before = tl.maximum(before, tl.max(tl.where(short, total, 0), 0))
    low = tl.maximum(low, tl.max(tl.where(short, tried + 1, low), 0))
    high = tl.minimum(high, tl.min(tl.where(short, high, tried), 0))
    return low, high, before


@triton.jit
def _between(low, high, S: tl.constexpr):
    parts = tl.arange(0, S.tried) + 1
    return low + ((high - low).to(tl.int64) * parts // (S.tried + 1)).to(tl.int32)


@triton.jit
def _gather(row, low, high, gathered, S: tl.constexpr):
    """Writes the bits of the distances from low to high; returns how many, more than a chunk if they are too many."""
    start, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    lanes = tl.arange(0, S.chunk)
    while (start < row[1]) & (found <= S.chunk):
        bits = _distances(row, start + lanes).to(tl.int32, bitcast=True)
        wanted = (bits >= low) & (bits <= high) & (start + lanes < row[1])
        places = found + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(gathered + places, bits, mask=wanted & (places < S.chunk))
        found += tl.sum(wanted.to(tl.int32), 0)
        start += S.chunk
    # Other threads read what this one wrote.
    tl.debug_barrier()
    return found


@triton.jit
def _first(row, scale, bound, high, gathered, COUNT: tl.constexpr, S: tl.constexpr):
    """The bits of the first distance, up to `high`, at which the sum over all tokens up to it, of ones or of weights,
    reaches `bound`, and the sum before it.
    """
    low, before = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    lanes = tl.arange(0, S.chunk)[None, :]
    rounds, found = tl.full((), 0, tl.int32), tl.full((), S.chunk + 1, tl.int32)
    while (low < high) & (found > S.chunk):
        if rounds == S.rounds:
            found = _gather(row, low, high, gathered, S)
            rounds -= 2
        else:
            tried = _between(low, high, S)
            sums = tl.full((S.tried, S.chunk), 0, tl.int64)
            for start in range(0, row[1], S.chunk):
                distances = _distances(row, start + lanes)
                if COUNT:
                    each = (start + lanes < row[1]).to(tl.int64)
                else:
                    each = _weights(distances, scale)
                sums += tl.where(distances.to(tl.int32, bitcast=True) <= tried[:, None], each, 0)
            low, high, before = _narrow(low, high, before, tried, tl.sum(sums, 1), bound)
            rounds += 1
    if low < high:
        outside = before
        here = lanes < found
        bits = tl.load(gathered + lanes, mask=here, other=0)
        if COUNT:
            each = here.to(tl.int64)
        else:
            each = tl.where(here, _weights(bits.to(tl.float32, bitcast=True), scale), 0)
        while low < high:
            tried = _between(low, high, S)
            sums = tl.sum(tl.where(bits <= tried[:, None], each, 0), 1)
            low, high, before = _narrow(low, high, before, tried, outside + sums, bound)
    return low, before


@triton.jit
def _up(number):
    """A float64 that is not negative, rounded up to int64."""
    whole = number.to(tl.int64)
    return whole + (whole.to(tl.float64) < number).to(tl.int64)


@triton.jit
def _weight_at(bits, scale):
    return _weights(bits.to(tl.float32, bitcast=True), scale)


# These change while a job runs: no kernel may be compiled for each.
@triton.jit(do_not_specialize=["stride", "vocab", "count"])
def draw_rows(logits, stride, vocab, count, columns, whole, token_ids, scratch, S: tl.constexpr):
    """Grid: (rows,); `columns` float64 [6, rows] are those of `SamplerColumns` and the row of logits, `whole` is
    `unit`, and `scratch` int32 [rows, S.chunk].
    """
    program = tl.program_id(0)
    column = columns + program
    temperature = tl.load(column).to(tl.float32)
    top_k = tl.load(column + count).to(tl.int64)
    top_p = tl.load(column + 2 * count)
    least = _up(tl.load(column + 3 * count) * whole)
    uniform = tl.load(column + 4 * count)
    begin = logits + tl.load(column + 5 * count).to(tl.int64) * stride
    scale = (-1.0 / tl.minimum(tl.maximum(temperature, 1e-37), 1e37), whole, least)
    gathered, lanes = scratch + program * S.chunk, tl.arange(0, S.chunk)

    highest = tl.full((S.chunk,), -float("inf"), tl.float32)
    broken = tl.full((S.chunk,), 0, tl.int32)
    for start in range(0, vocab, S.chunk):
        at = start + lanes
        each = tl.load(begin + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        no_number = (each.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > _INFINITY
        broken = broken | no_number.to(tl.int32)
        highest = tl.maximum(highest, tl.where(no_number, highest, each))
    # Adding zero turns -0.0 into +0.0, as in `sampler.below_peak`.
    peak = tl.max(highest, 0) + 0.0
    row = (begin, vocab, peak)
    token = tl.full((), _NO_TOKEN, tl.int32)
    if (tl.max(broken, 0) == 0) & (peak > -float("inf")) & (peak < float("inf")):
        # The mass of the tokens that top-k and min-p leave.
        everything = tl.full((), _INFINITY, tl.int32)
        if top_k < vocab:
            last, kept = _first(row, scale, top_k, everything, gathered, True, S)
        else:
            last, kept = everything, tl.full((), 0, tl.int64)
        sums = tl.full((S.chunk,), 0, tl.int64)
        for start in range(0, vocab, S.chunk):
            distances = _distances(row, start + lanes)
            nearer = distances.to(tl.int32, bitcast=True) < last
            sums += tl.where(nearer, _weights(distances, scale), 0)
        mass = tl.sum(sums, 0)
        if top_k < vocab:
            mass += (top_k - kept) * _weight_at(last, scale)
        if top_p < 1.0:
            bound = tl.maximum(_up(top_p * mass.to(tl.float64)), 1)
            last, before = _first(row, scale, bound, last, gathered, False, S)
            each = _weight_at(last, scale)
            mass = before + (bound - before + each - 1) // each * each
        bound = (uniform * mass.to(tl.float64)).to(tl.int64) + 1
        bits, before = _first(row, scale, bound, last, gathered, False, S)
        each = _weight_at(bits, scale)
        rank = (bound - before + each - 1) // each
        seen = tl.full((), 0, tl.int64)
        for start in range(0, vocab, S.chunk):
            at = start + lanes
            same = (_distances(row, at).to(tl.int32, bitcast=True) == bits) & (at < vocab)
            ranks = seen + tl.cumsum(same.to(tl.int32), 0)
            token = tl.maximum(token, tl.max(tl.where(same & (ranks == rank), at, _NO_TOKEN), 0))
            seen += tl.sum(same.to(tl.int32), 0)
    tl.store(token_ids + program, token.to(tl.int64))


def draw(logits: torch.Tensor, columns: torch.Tensor, rows: Sequence[int], sizes: RowSizes = SIZES) -> torch.Tensor:
    """Token ids int64 [R], on the device of logits [B, V] of any dtype, of its `rows`; as `sampler.choose`.

    `columns` [5, R, 1], in host memory, are `SamplerColumns`. Launches one kernel, and waits for nothing.
    """
    vocab = logits.shape[-1]
    where = torch.tensor(rows, dtype=torch.float64).view(1, -1, 1)
    settings = upload(torch.cat([columns, where]), logits.device)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    scratch = torch.empty(len(rows), sizes.chunk, dtype=torch.int32, device=logits.device)
    arguments = (logits, logits.stride(0), vocab, len(rows), settings, unit(vocab), token_ids, scratch, sizes)
    Launch(draw_rows, (len(rows),), arguments, _WARPS).run()
    return token_ids


@torch.inference_mode()
def wrong_draw(device: torch.device) -> str:
    """What a device draws otherwise than sorting does; "" if nothing. Raises what Triton and CUDA raise."""
    numbers = torch.Generator().manual_seed(1)
    spread = torch.tensor([0.1, 2.0, 6.0] * 4).view(-1, 1)
    filters = torch.tensor([[1.0, VOCAB, 1, 0], [0.7, 40, 0.95, 0], [1.5, VOCAB, 0.9, 0.01], [1.0, 1, 1, 0]]).double()
    wrong = 0
    for dtype in (torch.bfloat16, torch.float32):
        logits = (torch.randn(12, VOCAB, generator=numbers) * spread).to(dtype)
        uniform = torch.rand(12, generator=numbers, dtype=torch.float64)
        columns = torch.cat([filters.repeat_interleave(3, 0).T, uniform.view(1, -1)]).unsqueeze(-1)
        wanted = choose(logits.float(), SamplerColumns(*columns))
        wrong += int((draw(logits.to(device), columns, range(12)).cpu() != wanted).sum())
    # A number beside a boundary may fall on either side: exponentials differ in the last bit.
    return "" if wrong <= 1 else f"drawing tokens: {wrong} of 24 differ"
