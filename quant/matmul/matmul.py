"""Matmuls of activations with packed matrices on their device. Knows the kernels and when each is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType

import torch
from torch import Tensor

from ..formats import int4, int8
from ..formats.codec import CODECS
from ..formats.format import Layout
from ..scratch import TILE, is_direct, strip_rows
from ..tensor import PackedTensor, dtype_name
from .thread_pool import torch_threads
from .workspace import Scratch, Workspace

# The number of rows up to which torch's kernels on codes are used if nothing was measured (gemv.py).
GEMV_MAX_ROWS: Mapping[str, int] = MappingProxyType({"int8": 12, "int4": 24})


class Matmul:
    """Multiplies activations by packed matrices, as fast as possible or so that a row's bits depend on that row alone.

    `deterministic`: there is one kernel per format, whatever the number of rows. Rows are multiplied TILE at a time,
    copied to the same buffer and padded with zeros, and matrices in strips, each on one thread, so that every call has
    the same shapes, strides, alignment and number of threads. Then results depend only on the machine and its
    libraries. Other products vary: among 1, 64 or 300 other rows, or with another number of threads, the same row is
    computed by kernels that sum in another order.

    `integer`: int8 matrices are multiplied by activations that are rounded to int8, with a scale per row (W8A8).
    Integer sums are exact, so such products are always deterministic.

    `gemv_max_rows`: by format, the number of rows up to which torch's kernels on codes are used.
    """

    def __init__(
        self,
        workspace: Workspace,
        deterministic: bool = False,
        integer: bool = False,
        gemv_max_rows: Mapping[str, int] = GEMV_MAX_ROWS,
    ) -> None:
        self.workspace = workspace
        self.deterministic = deterministic
        self.integer = integer
        self.gemv_max_rows = gemv_max_rows

    def linear(self, x: Tensor, packed: PackedTensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, K] times packed [N, K] transposed, plus bias [N]: [T, N] in x's dtype, which is any weight dtype.

        Writes to `out` if given, whose rows are contiguous and do not overlap x. Raises FormatError if the workspace is
        too small for the product (scratch.scratch_nbytes).
        """
        y = x.new_empty(len(x), packed.shape[0]) if out is None else out
        if self.integer and packed.layout.format == "int8":
            int8.multiply_integers(x, packed.planes, y)
        elif not self.deterministic and is_direct(packed.layout, dtype_name(x.dtype)):
            torch.mm(x, packed.planes[0].t(), out=y)
        elif not self.deterministic and (multiply := self._kernel(x, packed)):
            y.copy_(multiply(x, packed.planes)[:, : y.shape[1]])
        else:
            self._multiply_strips(x, packed, y)
        return y if bias is None else y.add_(bias)

    def _kernel(self, x: Tensor, packed: PackedTensor) -> Callable[[Tensor, tuple[Tensor, ...]], Tensor] | None:
        """The kernel that multiplies by codes in place, if there is one and rows are few; else None.

        In float32 and float16 these kernels are slower than dequantizing, even for one row.
        """
        name = packed.layout.format
        if x.dtype != torch.bfloat16 or x.device.type != "cpu" or len(x) > self.gemv_max_rows.get(name, 0):
            return None
        if name == "int8":
            return int8.multiply if int8.has_kernel(x.shape[1]) else None
        return int4.multiply if int4.has_kernel() else None

    def _multiply_strips(self, x: Tensor, packed: PackedTensor, y: Tensor) -> None:
        with torch_threads(1) if self.deterministic and y.device.type == "cpu" else nullcontext():
            for strip in strips(packed.layout, self.deterministic):
                self.multiply_strip(x, packed, y, strip)

    def multiply_strip(self, x: Tensor, packed: PackedTensor, y: Tensor, strip: slice) -> None:
        """Writes the product of x [T, K] with the rows `strip` of packed [N, K] into those columns of y [T, N]."""
        scratch = self.workspace.cut(packed.layout, x.dtype, self.deterministic)
        direct = is_direct(packed.layout, dtype_name(x.dtype))
        planes = packed.rows(strip)
        part = y[:, strip]
        codec = CODECS[packed.layout.format]
        weight, scales = (planes[0], None) if direct else codec.unpack_unscaled(planes, *scratch[:2])
        weight = weight[: part.shape[1]]
        if self.deterministic:
            _multiply_tiles(x, weight, part, scratch)
        else:
            torch.mm(x, weight.t(), out=part)
        if scales is not None:
            part.mul_(scales)


def strips(layout: Layout, deterministic: bool) -> list[slice]:
    """The slices of rows of a matrix that are multiplied together."""
    # Slices, since torch.split takes eight times as long as one of them.
    rows = strip_rows(layout, deterministic)
    return [slice(start, start + rows) for start in range(0, layout.shape[0], rows)]


def _multiply_tiles(x: Tensor, weight: Tensor, y: Tensor, scratch: Scratch) -> None:
    product = scratch.y[:, : len(weight)]
    for start in range(0, len(x), TILE):
        rows = x[start : start + TILE]
        scratch.x[: len(rows)].copy_(rows)
        scratch.x[len(rows) :].zero_()
        torch.mm(scratch.x, weight.t(), out=product)
        y[start : start + TILE].copy_(product[: len(rows)])
