"""4-bit NormalFloat (Dettmers et al. 2023, QLoRA) in blocks of weights of a row.

Planes: codes uint8 [N, K/2], the first of two weights in the high bits; absmax [N, K/block], bfloat16 in format `nf4`.
Codes are bit-identical to those of bitsandbytes 0.50: the float32 absmax determines them and is rounded afterwards.
"""

from itertools import pairwise

import torch
from torch import Tensor

from . import bitsandbytes_kernels, lookup

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
VALUES = lookup.Values(LEVELS, high_first=True)
# A weight on a midpoint gets the lower level, as in bitsandbytes.
MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(LEVELS))
# The bound by which bitsandbytes avoids dividing a block of zeros by 0; another value would change codes.
SMALLEST_ABSMAX = 1e-38
# The largest absmax, in bfloat16 or wider, with which a block's largest weight does not overflow the matrix's dtype.
LARGEST_ABSMAX = {
    torch.float32: torch.finfo(torch.bfloat16).max,
    torch.bfloat16: torch.finfo(torch.bfloat16).max,
    torch.float16: 65280.0,
}


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Packs `weight` [n, K], finite: each weight gets the level nearest to weight / absmax of its block."""
    codes, absmax = planes
    blocks = weight.float().reshape(absmax.numel(), -1)
    scaled = blocks.abs()
    wide = scaled.amax(1)
    absmax.view(-1).copy_(wide.clamp(max=LARGEST_ABSMAX[weight.dtype]))
    torch.mul(blocks, wide.clamp_(min=SMALLEST_ABSMAX).reciprocal_()[:, None], out=scaled)
    # Converts through int16, because float32 to uint8 is several times slower.
    first, second = _nearest_levels(scaled).to(torch.int16).view(len(codes), -1, 2).unbind(-1)
    torch.add(second, first, alpha=16, out=codes)


def _nearest_levels(scaled: Tensor) -> Tensor:
    """Indices into LEVELS for numbers in [-1, 1], as float32: the number of midpoints below each.

    Fifteen vectorized comparisons are four times as fast as the binary search of torch.bucketize. They write float32
    because comparisons that write bool are not vectorized.
    """
    counts, above = torch.zeros_like(scaled), torch.empty_like(scaled)
    for midpoint in MIDPOINTS:
        counts.add_(torch.gt(scaled, midpoint, out=above))
    return counts


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes levels times absmax into `out` [n, K]. `wide` is float32 scratch [at least n, K/block]."""
    codes, absmax = planes
    scales = wide[: len(absmax)].copy_(absmax)
    if bitsandbytes_kernels.serves(out.device.type):
        bitsandbytes_kernels.dequantize_nf4(codes, scales, out.shape[1] // scales.shape[1], out)
    else:
        lookup.unpack(codes, VALUES, scales, out)


def unpack_unscaled(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """Writes the matrix into `out`; no scales are left to apply."""
    weight = out[: len(planes[0])]
    unpack(planes, weight, wide)
    return weight, None
