"""The table of codecs, which pack and unpack each format; extend it when a format is added."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from . import int4, int8, nf4, plain


class Codec(Protocol):
    """Converts n consecutive rows of a matrix [N, K] to the same rows of its planes, and back.

    `planes` are in the order of the format's rules and have R rows, n rounded up to whole blocks. `wide` is float32
    scratch [R, scratch.wide_columns].
    """

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...]) -> None:
        """Fills the planes from `weight` [n, K], finite, with any strides."""

    def unpack(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
        """Writes the rows into `out` [n, K], contiguous, of any weight dtype."""

    def unpack_unscaled(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
        """Unpacks the rows without the scales that are cheaper to apply to a product; returns (matrix, scales).

        The matrix [n, K], of any strides, is in the memory of `out`, scratch [R, K]. `scales` [n] are the factors per
        row that are still to be applied; None if the matrix has all of them.
        """


CODECS: Mapping[str, Codec] = MappingProxyType({"none": plain, "int8": int8, "int4": int4, "nf4": nf4})
