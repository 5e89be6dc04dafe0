"""Format `none`: the matrix without quantization. Planes: weight [N, K]."""

from torch import Tensor


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Copies `weight` [n, K] into its plane."""
    planes[0].copy_(weight)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Copies the matrix into `out` [n, K] and converts it to the dtype of `out`."""
    out.copy_(planes[0])
