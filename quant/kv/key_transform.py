"""The transform of keys before they are quantized: a fixed offset per head is subtracted, then keys are rotated.

Neither changes attention: a rotation of both queries and keys does not change their products, and an offset that is the
same for all keys shifts all scores of a query by the same amount, which softmax ignores. The rotation spreads outlier
channels (QuaRot, arXiv 2404.00456); the offset removes what biases of key projections add to every token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
TILE = 256


class KeyTransform:
    """Transforms keys and queries. `offsets` [layers, H, D] are subtracted from the keys of a layer and head.

    Offsets are zero if none were measured. `tiled` rotates TILE vectors at a time in one buffer, so that the bits of a
    vector depend on that vector alone.
    """

    def __init__(self, offsets: Tensor, tiled: bool = False) -> None:
        dim = offsets.shape[-1]
        self.offsets = offsets.float()
        self.rotation = rotation(dim).to(offsets.device)
        self._back = self.rotation.T.contiguous()
        self._tile = self.rotation.new_zeros(2, TILE, dim) if tiled else None

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
        for start in range(0, len(rows), TILE):
            part = rows[start : start + TILE]
            tile[: len(part)].copy_(part)
            tile[len(part) :].zero_()
            torch.mm(tile, matrix, out=product)
            rotated[start : start + TILE].copy_(product[: len(part)])
        return rotated.view(x.shape)
