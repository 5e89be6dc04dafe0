"""Format `int8`: symmetric, one float32 scale per row. Planes: codes int8 [N, K], scales [N].

weight[n, k] is about codes[n, k] * scales[n]; codes are in [-127, 127].
"""

import torch
from torch import Tensor

from .finite import refuse_nonfinite

# Weights converted at a time, so that the float32 copy stays in a core's cache.
CHUNK = 1 << 17
# Keeps the scale of a row of zeros, or nearly so, a normal number; the row's codes are then 0.
SMALLEST_ABSMAX = 1e-30


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Rounds `weight` [N, K] to the nearest code, half to even: off by at most half a scale."""
    codes, scales = planes
    rows = max(1, CHUNK // weight.shape[1])
    scratch = torch.empty(2, min(rows, len(weight)), weight.shape[1], device=weight.device)
    parts = zip(*(torch.split(tensor, rows) for tensor in (weight, codes, scales)), strict=True)
    for part, part_codes, part_scales in parts:
        values, magnitudes = scratch[:, : len(part)]
        # Not vector_norm, which takes sixteen times as long for the same maxima.
        torch.amax(torch.abs(values.copy_(part), out=magnitudes), 1, out=part_scales)
        refuse_nonfinite(weight, part_scales)
        part_scales.clamp_(min=SMALLEST_ABSMAX).div_(127)
        part_codes.copy_(values.div_(part_scales[:, None]).round_())


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes codes times scales, multiplied in float32, into `out` [N, K]."""
    codes, scales = planes
    torch.mul(codes, scales[:, None], out=out)


def factor(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> Tensor | None:
    """Writes the bare codes into `out` and returns the scales [N] in its dtype, which are left to multiply by.

    Codes are exact in every dtype and converting them is six times as fast as scaling them. In float16 a sum of
    bare codes can overflow where the product would not: there the matrix is written scaled and nothing is left.
    """
    codes, scales = planes
    if out.dtype == torch.float16:
        unpack(planes, out, wide)
        return None
    out.copy_(codes)
    return scales.to(out.dtype)
