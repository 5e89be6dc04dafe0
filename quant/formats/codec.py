"""Which code packs and unpacks which format: the one table to extend when a format is added."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from . import int4, int8, nf4, plain


class Codec(Protocol):
    """Turns runs of n rows of a matrix [N, K] into the same rows of its planes, and back.

    `planes` come in the order of the format's rules, with rows to the end of the last block. `wide` is float32
    scratch [as many rows, scratch.wide_columns].
    """

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...]) -> None:
        """Fills the planes from `weight` [n, K], finite, any strides."""

    def unpack(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
        """Writes the rows into `out` [n, K], contiguous, of any weight dtype."""

    def factor(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is cheapest to multiply by, and the factors [n] per row left out of it.

        That is a matrix [n, K] of any strides in the memory of `out`, scratch [rows of planes, K].
        """


CODECS: Mapping[str, Codec] = MappingProxyType({"none": plain, "int8": int8, "int4": int4, "nf4": nf4})
