"""Encodes vectors of the KV cache and decodes them, with torch on any device. `format` defines the codes.

Scales and zeros are rounded to float16 before the codes are computed from them, so decoding uses exactly the same
scales. Quotients are rounded by floor(x + 0.5), which every kernel language has. NaN, infinities and values beyond
float16's range (scales above 65504) decode as not finite; such a sequence ends with an error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..tensor import torch_dtype
from .format import VectorFormat

# A subnormal float16 with seven bits of precision; smaller scales would be rounded too coarsely.
SMALLEST_SCALE = 2.0**-17
INT8_CODES = 127
INT4_CODES = 15


class Coded(NamedTuple):
    """Encoded vectors: codes [..., D/packed], scales and zeros [..., groups] or None."""

    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None


def encode(x: Tensor, vectors: VectorFormat) -> Coded:
    """Encodes x [..., D] of any float dtype."""
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
    # The halves have their own axis: [..., 2, D/2].
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
