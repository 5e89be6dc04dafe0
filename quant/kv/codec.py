"""Vectors of the KV cache to codes and back, with torch on any device. `kv_format` says what the codes mean.

Scales and zeros are rounded to float16 before the codes are decided by them, so that decoding is exact about what was
kept. Quotients are rounded by floor(x + 0.5), which every kernel language has. NaN, infinities
and what exceeds float16's range (scales above 65504) decode as not finite: such a sequence ends as an error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..tensor import torch_dtype
from .format import VectorFormat

# A subnormal float16 that still has seven bits; smaller scales would be rounded too coarsely to cover their range.
SMALLEST_SCALE = 2.0**-17
INT8_CODES = 127
INT4_CODES = 15


class Coded(NamedTuple):
    """Vectors as a format keeps them: codes [..., D/packed], scales and zeros [..., groups] or None."""

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None


def encode(x: Tensor, vectors: VectorFormat) -> Coded:
    """x [..., D], any float dtype."""
    if not vectors.quantized:
        return Coded(x.to(torch_dtype(vectors.code)))
    return _encode_int4(x.float()) if vectors.has_zeros else _encode_int8(x.float())


def decode(coded: Coded, vectors: VectorFormat, dtype: torch.dtype) -> Tensor:
    """The vectors [..., D] in `dtype`, computed in float32."""
    codes, scales, zeros = coded
    if scales is None:
        return codes.to(dtype)
    if zeros is None:
        return (codes * scales.float()).to(dtype)
    # Halves as an axis of their own: [..., 2, D/2].
    halves = torch.stack([codes & INT4_CODES, codes >> 4], dim=-2)
    return torch.addcmul(zeros.float().unsqueeze(-1), halves, scales.float().unsqueeze(-1)).flatten(-2).to(dtype)


def _encode_int8(x: Tensor) -> Coded:
    scales = _scales(x.abs().amax(-1, keepdim=True), INT8_CODES)
    codes = (x / scales.float()).add_(0.5).floor_().clamp_(-INT8_CODES, INT8_CODES)
    return Coded(codes.to(torch.int8), scales)


def _encode_int4(x: Tensor) -> Coded:
    halves = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    low, high = halves.aminmax(dim=-1)
    zeros = low.half()
    scales = _scales(high - zeros.float(), INT4_CODES)
    quotients = (halves - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)
    codes = quotients.add_(0.5).floor_().clamp_(0, INT4_CODES).to(torch.uint8)
    return Coded(codes[..., 0, :] | codes[..., 1, :] << 4, scales, zeros)


def _scales(extent: Tensor, steps: int) -> Tensor:
    return (extent / steps).clamp_(min=SMALLEST_SCALE).half()
