"""8-bit integers with a scale per row or per group: symmetric. Planes: codes int8 [N, K], scales [N] or [N, K/group].

weight[n, k] is approximately codes[n, k] * its scale; codes that are packed here are in [-127, 127].
"""

from functools import cache

import torch
from torch import Tensor

from .lookup import chunks_of

# 1.5 * 2^23: a float32 near it has no bits left for a fraction, so adding it rounds to nearest, half to even.
# torch.round does the same, but starts threads for as few as 2048 numbers (see format.CHUNK).
ROUNDER = 12582912.0
# A lower bound, so that the scale of a row of zeros, or nearly zeros, is a normal number; its codes are then 0.
SMALLEST_ABSMAX = 1e-30
# float32 sums the products of this many columns of codes without rounding: 1024 * 127 * 127 < 2^24.
EXACT_COLUMNS = 1024
# The number of codes that are converted to float32 at a time for such sums.
WIDE_CODES = 1 << 21


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Packs `weight` [n, K], finite: rounds to the nearest code, half to even, so errors are at most half a scale."""
    codes, scales = planes
    values = weight.float().view(*scales.shape, -1)
    # vector_norm would take sixteen times as long for the same maxima.
    scaled = values.abs()
    steps = scaled.amax(-1).clamp_(min=SMALLEST_ABSMAX).div_(127)
    # A scale of 16 bits is rounded before codes are divided by it, and must not become 0 (tiny * eps is the smallest
    # positive number) or infinite.
    finfo = torch.finfo(scales.dtype)
    scales.copy_(steps.clamp_(min=finfo.tiny * finfo.eps, max=finfo.max))
    torch.div(values, scales.float()[..., None], out=scaled).add_(ROUNDER).sub_(ROUNDER).clamp_(-127, 127)
    codes.view_as(scaled).copy_(scaled)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes codes times scales, multiplied in float32, into `out` [n, K]."""
    codes, scales = planes
    if scales.dim() == 1:
        torch.mul(codes, scales[:, None], out=out)
        return
    for rows in chunks_of(out):
        groups = codes[rows].float().view(*scales[rows].shape, -1)
        out[rows].view_as(groups).copy_(groups.mul_(scales[rows].float()[..., None].expand_as(groups).contiguous()))


def unpack_unscaled(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """Writes the codes into `out` without scaling; returns it and the scales [n] in its dtype, still to be applied.

    Codes are exact in every dtype, and converting them is six times as fast as scaling them. In float16, a sum of
    unscaled codes can overflow where the product would not: there, and with scales per group, the matrix is scaled and
    no scales are returned.
    """
    codes, scales = planes
    weight = out[: len(codes)]
    if out.dtype == torch.float16 or scales.dim() > 1:
        unpack(planes, weight, wide)
        return weight, None
    return weight.copy_(codes), scales.to(out.dtype)


def multiply(x: Tensor, planes: tuple[Tensor, ...]) -> Tensor:
    """x [T, K], bfloat16 on a CPU, times the transposed matrix: a new tensor [T, N]; fast for few rows."""
    codes, scales = planes
    return torch._weight_int8pack_mm(x, codes, scales.to(x.dtype))


def has_kernel(planes: tuple[Tensor, ...]) -> bool:
    """Whether `multiply` may be used: rows have one scale.

    On AVX-512 the kernel reads 16 columns at a time, beyond the end of a row.
    """
    codes, scales = planes
    return scales.dim() == 1 and codes.shape[1] % 16 == 0


def multiply_integers(x: Tensor, planes: tuple[Tensor, ...], out: Tensor) -> None:
    """Writes x [T, K], rounded to int8, times the transposed matrix into `out` [T, N]; integer sums do not round.

    Each row of x has its own scale, like each row of the matrix (LLM.int8(), Dettmers et al. 2022, without outlier
    columns).
    """
    codes, scales = planes
    if not len(x):
        return
    # All in float32: reductions over bfloat16, and operations that mix dtypes, take two to five times as long.
    values = x.float()
    steps = torch.maximum(values.amax(1), values.amin(1).neg_()).clamp_(min=SMALLEST_ABSMAX).div_(127).unsqueeze(1)
    rounded = values.mul(steps.reciprocal()).round_().to(torch.int8)
    sums = torch._int_mm(rounded, codes.t()) if has_integer_sums() else _sums(rounded, codes)
    out.copy_(sums.float().mul_(steps).mul_(scales))


@cache
def has_integer_sums() -> bool:
    """Whether torch's integer product is exact and fast on this machine.

    Without VNNI, oneDNN adds products in pairs in 16 bits, and saturates; without AVX-512, torch multiplies in a loop
    of its own, ten times as long as sums in float32 take.
    """
    largest, sum_of = torch.full((33, 64), 127, dtype=torch.int8), 64 * 127 * 127
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and all(
        bool((torch._int_mm(largest[:count], largest.t()) == sum_of).all()) for count in (1, len(largest))
    )


def _sums(x: Tensor, codes: Tensor) -> Tensor:
    """x [T, K] times codes [N, K] transposed, both int8 in -127 to 127: int32, by exact sums in float32."""
    sums = torch.zeros(len(x), len(codes), dtype=torch.int32)
    for column in range(0, x.shape[1], EXACT_COLUMNS):
        columns = slice(column, column + EXACT_COLUMNS)
        wide = x[:, columns].float()
        for row in range(0, len(codes), rows := WIDE_CODES // EXACT_COLUMNS):
            part = codes[row : row + rows, columns].float()
            sums[:, row : row + rows] += (wide @ part.t()).to(torch.int32)
    return sums
