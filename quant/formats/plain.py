"""Format `none`: the matrix as it is. Planes: weight [N, K]."""

from torch import Tensor


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Copies `weight` [n, K] into its plane."""
    planes[0].copy_(weight)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Copies the matrix into `out` [n, K], converting where dtypes differ."""
    out.copy_(planes[0])


def factor(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """The matrix itself; no factor is left out."""
    return out[: len(planes[0])].copy_(planes[0]), None
