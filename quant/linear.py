"""Products of activations with packed matrices, on whatever device they are. Knows kernels and when each is best."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from .codec import CODECS
from .scratch import TILE, is_direct, strip_rows
from .tensor import PackedTensor, dtype_name
from .workspace import Scratch, Workspace

# Beyond four rows the time of torch's int8 kernel grows with every row, while converting the codes first costs the
# same for any number: the two meet at about 16 (bench/linear.py).
INT8_KERNEL_ROWS = 12


class Compute:
    """How activations meet packed matrices: as fast as possible, or so that a row's bits depend on that row alone.

    `deterministic`: one kernel per format whatever the number of rows; rows go through it TILE at a time, copied to
    the same place and padded with zeros, so that every call has the same shapes, strides and alignment. What is then
    left to vary is the machine, its libraries and its number of threads. Plain products do differ: the same row
    among 1 and 64, or 64 and 300 others, meets other kernels that sum in another order.
    """

    def __init__(self, workspace: Workspace, deterministic: bool = False) -> None:
        self.workspace = workspace
        self.deterministic = deterministic

    def linear(self, x: Tensor, packed: PackedTensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] times packed [N, K] transposed, plus bias [N]: new [T, N] in x's dtype, any weight dtype.

        Raises FormatError if the workspace is too small for such a product (scratch.scratch_nbytes).
        """
        if not self.deterministic:
            if is_direct(packed.layout, dtype_name(x.dtype)):
                return linear(x, packed.planes[0], bias)
            if _suits_int8_kernel(x, packed):
                codes, scales = packed.planes
                return _add(torch._weight_int8pack_mm(x, codes, scales.to(x.dtype)), bias)
        y = x.new_empty(len(x), packed.shape[0])
        self._multiply_strips(x, packed, y)
        return _add(y, bias)

    def _multiply_strips(self, x: Tensor, packed: PackedTensor, y: Tensor) -> None:
        scratch = self.workspace.cut(packed.layout, x.dtype, self.deterministic)
        direct = is_direct(packed.layout, dtype_name(x.dtype))
        codec = CODECS[packed.layout.format]
        # Slices, since torch.split costs eight times as much as one of them.
        for start in range(0, packed.shape[0], rows := strip_rows(packed.shape)):
            strip = slice(start, start + rows)
            planes = tuple([plane[strip] for plane in packed.planes])
            part = y[:, strip]
            weight = planes[0] if direct else scratch.weight[: part.shape[1]]
            factor = None if direct else codec.factor(planes, weight, scratch.wide)
            if self.deterministic:
                _multiply_tiles(x, weight, part, scratch)
            else:
                torch.mm(x, weight.t(), out=part)
            if factor is not None:
                part.mul_(factor)


def _multiply_tiles(x: Tensor, weight: Tensor, y: Tensor, scratch: Scratch) -> None:
    product = scratch.y[:, : len(weight)]
    for start in range(0, len(x), TILE):
        rows = x[start : start + TILE]
        scratch.x[: len(rows)].copy_(rows)
        scratch.x[len(rows) :].zero_()
        torch.mm(scratch.x, weight.t(), out=product)
        y[start : start + TILE].copy_(product[: len(rows)])


def _suits_int8_kernel(x: Tensor, packed: PackedTensor) -> bool:
    """In float32 and float16 this kernel is slower than converting even for one row."""
    return (
        packed.layout.format == "int8"
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and len(x) <= INT8_KERNEL_ROWS
    )


def _add(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)
