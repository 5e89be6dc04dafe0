"""Format `int8`: symmetric, one float32 scale per row. Planes: codes int8 [N, K], scales [N].

weight[n, k] is about codes[n, k] * scales[n]; codes are in [-127, 127].
"""

import torch
from torch import Tensor

# 1.5 * 2^23: a float32 near it has no bits left for a fraction, so adding it rounds to nearest, half to even.
# torch.round does the same, but starts threads for as few as 2048 numbers (see chunks.CHUNK).
ROUNDER = 12582912.0
# Keeps the scale of a row of zeros, or nearly so, a normal number; the row's codes are then 0.
SMALLEST_ABSMAX = 1e-30


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Rounds `weight` [n, K], finite, to the nearest code, half to even: off by at most half a scale."""
    codes, scales = planes
    values = weight.float()
    # Not vector_norm, which takes sixteen times as long for the same maxima.
    scaled = values.abs()
    torch.amax(scaled, 1, out=scales)
    scales.clamp_(min=SMALLEST_ABSMAX).div_(127)
    codes.copy_(torch.div(values, scales[:, None], out=scaled).add_(ROUNDER).sub_(ROUNDER))


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes codes times scales, multiplied in float32, into `out` [n, K]."""
    codes, scales = planes
    torch.mul(codes, scales[:, None], out=out)


def factor(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """Writes the bare codes into `out` and returns the scales [n] in its dtype, which are left to multiply by.

    Codes are exact in every dtype and converting them is six times as fast as scaling them. In float16 a sum of
    bare codes can overflow where the product would not: there the matrix is written scaled and nothing is left.
    """
    codes, scales = planes
    weight = out[: len(codes)]
    if out.dtype == torch.float16:
        unpack(planes, weight, wide)
        return weight, None
    return weight.copy_(codes), scales.to(out.dtype)


def multiply(x: Tensor, planes: tuple[Tensor, ...]) -> Tensor:
    """x [T, K], bfloat16 on a CPU, times the matrix transposed: new [T, N]. By torch's kernel, fast for few rows."""
    codes, scales = planes
    return torch._weight_int8pack_mm(x, codes, scales.to(x.dtype))


def has_kernel(num_columns: int) -> bool:
    """Whether `multiply` may be used: on AVX-512 the kernel reads 16 columns at a time, beyond the end of the rows."""
    return num_columns % 16 == 0


def multiply_integers(x: Tensor, planes: tuple[Tensor, ...], out: Tensor) -> None:
    """Writes round(x) [T, K] times the matrix transposed into `out` [T, N], summed as integers, without rounding.

    Each row of x has a scale of its own, as each row of the matrix has (LLM.int8(), Dettmers et al. 2022, without its
    outlier columns).
    """
    codes, scales = planes
    if not len(x):
        return
    # In float32 throughout: reductions over bfloat16, and operations that mix dtypes, take two to five times as long.
    values = x.float()
    steps = torch.maximum(values.amax(1), values.amin(1).neg_()).clamp_(min=SMALLEST_ABSMAX).div_(127).unsqueeze(1)
    rounded = values.mul(steps.reciprocal()).round_().to(torch.int8)
    out.copy_(torch._int_mm(rounded, codes.t()).float().mul_(steps).mul_(scales))
