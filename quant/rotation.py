"""An orthonormal matrix that spreads any one element of a vector over all of them, for every size."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotation(dim: int) -> Tensor:
    """Orthonormal [dim, dim], float32. A power of two gives Sylvester's Hadamard matrix.

    For other sizes (80, 96) it is the Kronecker product of the largest Hadamard matrix whose order divides `dim` and a
    cosine transform of the odd rest, so that no part of the vector keeps its outliers to itself.
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
