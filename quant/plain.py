"""Format `none`: the matrix as it is. Planes: weight [N, K]."""

import torch
from torch import Tensor

from .finite import refuse_nonfinite


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Copies `weight` [N, K] into its plane."""
    refuse_nonfinite(weight, torch.cat([weight.amax(1), weight.amin(1)]))
    planes[0].copy_(weight)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Copies the matrix into `out` [N, K], converting where dtypes differ."""
    out.copy_(planes[0])


# No factor is left out.
factor = unpack
