"""Transforms keys, encodes vectors of the KV cache and decodes them, with torch on any device. `format` defines codes.

Scales and zeros are rounded to float16 before the codes are computed from them, so decoding uses exactly the same
scales. Quotients are rounded by floor(x + 0.5), which every kernel language has. NaN, infinities and values beyond
float16's range (scales above 65504) decode as not finite; such a sequence ends with an error.
"""

from __future__ import annotations

import math
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


def rotation(dim: int) -> Tensor:
    """An orthonormal matrix [dim, dim], float32. If `dim` is a power of two, it is Sylvester's Hadamard matrix.

    For other sizes (80, 96) it is the Kronecker product of the largest Hadamard matrix whose order divides `dim` and a
    cosine transform of the odd rest, so that outliers are spread over the whole vector.
    """
    order = dim & -dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    for _ in range(order.bit_length() - 1):
        matrix = torch.kron(step, matrix)
    return torch.kron(_cosines(dim // order), matrix).float()


def _cosines(dim: int) -> Tensor:
    """The orthonormal DCT-II [dim, dim]."""
    index = torch.arange(dim, dtype=torch.float64)
    matrix = torch.cos(math.pi / dim * torch.outer(index, index + 0.5)) * math.sqrt(2 / dim)
    matrix[0] /= math.sqrt(2)
    return matrix


# The number of rows that are rotated together, padded with zeros, if bits must not depend on the number of rows.
ROTATED_ROWS = 256


class KeyTransform:
    """Transforms keys before they are quantized, and queries: keys less a fixed offset per head, then both rotated.

    `offsets` [layers, H, D] are subtracted from the keys of a layer and head.

    Neither changes attention: a rotation of both queries and keys does not change their products, and an offset that is
    the same for all keys shifts all scores of a query by the same amount, which softmax ignores. The rotation spreads
    outlier channels (QuaRot, arXiv 2404.00456); the offset removes what biases of key projections add to every token.

    Offsets are zero if none were measured. `tiled` rotates ROTATED_ROWS vectors at a time in one buffer, so that the
    bits of a vector depend on that vector alone.
    """

    def __init__(self, offsets: Tensor, tiled: bool = False) -> None:
        dim = offsets.shape[-1]
        self.offsets = offsets.float()
        self.rotation = rotation(dim).to(offsets.device)
        self._back = self.rotation.T.contiguous()
        self._tile = self.rotation.new_zeros(2, ROTATED_ROWS, dim) if tiled else None

    def keys(self, layer: int, k: Tensor) -> Tensor:
        """k [T, H, D] transformed, float32: the keys to be stored."""
        return self._rotate(k.float() - self.offsets[layer], self.rotation)

    def queries(self, q: Tensor) -> Tensor:
        """q [T, Hq, D] rotated, float32: its products with stored keys equal those of q with (k - offset)."""
        return self._rotate(q.float(), self.rotation)

    def restore(self, layer: int, x: Tensor) -> Tensor:
        """Undoes `keys` for x [T, H, D]: float32. Also for averages of keys whose weights sum to one."""
        return self._rotate(x.float(), self._back) + self.offsets[layer]

    def shifts(self, layer: int, q: Tensor) -> Tensor:
        """q · offset [T, Hq], float32, which is missing in scores; needed if scores are more than softmax's input."""
        offsets = self.offsets[layer]
        grouped = q.float().view(len(q), len(offsets), -1, q.shape[-1])
        return (grouped * offsets.unsqueeze(1)).sum(-1).flatten(1)

    def _rotate(self, x: Tensor, matrix: Tensor) -> Tensor:
        if self._tile is None:
            return x @ matrix
        rows = x.reshape(-1, x.shape[-1])
        rotated = torch.empty_like(rows)
        tile, product = self._tile
        for start in range(0, len(rows), ROTATED_ROWS):
            part = rows[start : start + ROTATED_ROWS]
            tile[: len(part)].copy_(part)
            tile[len(part) :].zero_()
            torch.mm(tile, matrix, out=product)
            rotated[start : start + ROTATED_ROWS].copy_(product[: len(part)])
        return rotated.view(x.shape)
