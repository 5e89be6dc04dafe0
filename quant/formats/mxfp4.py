"""MXFP4 of the OCP Microscaling specification 1.0: e2m1 in groups of 32 weights of a row, each with a power of two.

Planes: codes uint8 [N, K/2], the first of two weights in the low bits; scales uint8 [N, K/32], e8m0: the exponent plus
127. A weight is LEVELS[code] * 2^(scale - 127), exact in bfloat16. These are the bytes of gpt-oss checkpoints.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from ..native.calls import widen_mxfp4
from . import lookup

GROUP = 32
BIAS = 127
# The scale that means NaN.
NAN = 255
# e2m1 without a sign; bit 3 of a code is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS = (*MAGNITUDES, *(-each for each in MAGNITUDES))
VALUES = lookup.Values(LEVELS)
# A weight on a midpoint gets the level nearer to 0, as in gguf.
MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(MAGNITUDES))
# The exponent of the largest magnitude.
LARGEST_EXPONENT = 2
# Weights that are widened at a time, with a byte of indices each: fewer take longer, for what every call costs.
CHUNK = 1 << 20


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Packs `weight` [n, K], finite, as the specification suggests and gguf 0.19 does.

    The scale is the power of two of the largest weight less that of 6. Weights go to the nearest level, 6 at most.
    """
    codes, scales = planes
    groups = weight.contiguous().view(-1, GROUP)
    if weight.dtype == torch.bfloat16:
        # Magnitudes are in the order of their bits, whose maximum takes a third of the time.
        largest = torch.bitwise_and(groups.view(torch.int16), 0x7FFF).amax(1).view(torch.bfloat16).float()
    else:
        largest = groups.abs().amax(1).float()
    # frexp's mantissa is in [0.5, 1). A group of zeros gets the smallest scale.
    mantissa, exponent = torch.frexp(largest)
    exponent.sub_(1 + LARGEST_EXPONENT).add_(BIAS).clamp_(min=0).mul_(mantissa > 0)
    scales.view(-1).copy_(exponent)
    bits = (
        groups.to(torch.float32, copy=True)
        .div_(_powers(torch.float32, groups.device)[exponent][:, None])
        .view(torch.int32)
        .view(-1)
    )
    if weight.dtype != torch.bfloat16:
        # Bits that are cut off set the last one that stays, which no midpoint has: none is passed, and none is met.
        bits.bitwise_or_((bits & 0xFFFF).add_(0xFFFF))
    upper = torch.bitwise_right_shift(bits, 16).bitwise_and_(0xFFFF)
    # Both codes of a byte at once, the first in the low bits of 16; as two tensors they would be read with a stride.
    pairs = torch.index_select(_codes(bits.device), 0, upper).view(torch.int16)
    torch.bitwise_or(pairs, pairs >> 4, out=pairs)
    codes.view(-1).copy_(pairs)


@cache
def _codes(device: torch.device) -> Tensor:
    """The code of every bfloat16 by its bits: uint8 [65536]."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).float()
    counts = torch.bucketize(numbers.abs(), torch.tensor(MIDPOINTS))
    # A weight that becomes 0 has no sign.
    return torch.where((numbers < 0) & (counts > 0), counts + len(MAGNITUDES), counts).to(torch.uint8).to(device)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes the matrix into `out` [n, K]."""
    codes, scales = planes
    if widen_mxfp4(codes, scales, out):
        return
    # Four weights are written at once.
    if out.dtype == torch.bfloat16 and out.is_cpu and out.storage_offset() % 4 == 0:
        _unpack_exactly(codes, scales, out)
    else:
        lookup.unpack(codes, VALUES, _scales(scales, torch.float32), out)


def _unpack_exactly(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes the matrix into `out`, bfloat16 on a CPU: levels of four codes at once, times their powers of two."""
    table = _quadruples()
    rows = max(1, CHUNK // out.shape[1])
    for start in range(0, len(out), rows):
        part = out[start : start + rows]
        pairs = codes[start : start + rows].contiguous().view(torch.uint16).to(torch.int32)
        torch.index_select(table, 0, pairs.view(-1), out=part.view(torch.int64).view(-1))
        groups = part.view(-1, GROUP)
        factors = _scales(scales[start : start + rows], out.dtype).view(-1, 1)
        groups.mul_(factors)


def _scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The powers of two of e8m0 scales, in their shape."""
    return _powers(dtype, scales.device).index_select(0, scales.reshape(-1).int()).view(scales.shape)


@cache
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The value of every scale: [256]; the last is NaN."""
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - BIAS)
    powers[NAN] = torch.nan
    return powers.to(device, dtype)


@cache
def _quadruples() -> Tensor:
    """For every two bytes of codes their four levels, bfloat16, as the bits of one int64 [65536]; 512 KiB."""
    codes = torch.arange(1 << 16)[:, None] >> torch.arange(0, 16, 4)[None] & 15
    return torch.tensor(LEVELS, dtype=torch.bfloat16)[codes].contiguous().view(torch.int64).view(-1)
