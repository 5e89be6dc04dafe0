"""Format `none`: the matrix without quantization. Planes: weight [N, K]."""

from torch import Tensor


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Copies `weight` [n, K] into its plane."""
    planes[0].copy_(weight)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Copies the matrix into `out` [n, K] and converts it to the dtype of `out`."""
    out.copy_(planes[0])


def unpack_unscaled(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """Copies the matrix into `out`; no scales are left to apply."""
    return out[: len(planes[0])].copy_(planes[0]), None
