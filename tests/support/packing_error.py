"""How far a packed matrix is from the one it was packed from."""

import torch
from torch import Tensor

from moedge.quant.tensor import PackedTensor


def relative_error(weight: Tensor, packed: PackedTensor) -> float:
    """|weight - packed| / |weight|, Frobenius norms in float64; 0 for a matrix of zeros kept as zeros."""
    exact = weight.double()
    difference = packed.dequantize(torch.empty_like(weight, dtype=torch.float32)).double() - exact
    norm = torch.linalg.vector_norm(difference)
    return 0.0 if norm == 0 else float(norm / torch.linalg.vector_norm(exact))
