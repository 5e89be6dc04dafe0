"""Products with matrices in order `tiles`, by the kernels of quant/native: one matrix, or all experts of a pass.

With AVX2 alone they take matrices of bfloat16, too, as these lie (row_layouts.takes_floats).

Every thread of a pool calls the same C function with the same arguments, and each takes the next item (a tile of a
matrix and the rows that it is multiplied by) from a counter that they share. A row's bits depend on neither the other
rows nor the threads (native/tiles.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, addressof, byref, c_int64
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.format import TILES
from ..kernels.operands import Gate
from ..native.calls import native_matrix
from ..native.library import (
    CONSTANTS,
    ENUMS,
    NativeExpert,
    NativeJob,
    NativeMatrix,
    NativeMixture,
    NativeProduct,
    available,
    function,
)
from ..scratch import row_nbytes
from ..tensor import PackedTensor
from .row_layouts import takes_floats

# Calls a function on every thread of a pool, and returns when all calls have ended.
OnThreads = Callable[[Callable[[], None]], None]
# An expert's matrices, each with its bias.
ExpertMatrices = tuple[PackedTensor, Tensor | None, PackedTensor, Tensor | None]
# The rows that a kernel multiplies together.
MOST_ROWS = CONSTANTS["most_rows"]
# By the name of an activation (kernels/operands.py).
ACTIVATIONS = ENUMS["activation"]
_Counters = c_int64 * CONSTANTS["counters"]


def has_kernel() -> bool:
    """Whether matrices in order `tiles` can be multiplied without dequantizing them first."""
    return available()


def takes(x: Tensor, packed: PackedTensor) -> bool:
    """Whether `multiply` can be used for such rows and such a matrix."""
    known = packed.layout.order == TILES or (takes_floats(packed.layout) and packed.planes[0].is_contiguous())
    return known and x.dtype == torch.bfloat16 and x.device.type == "cpu" and available()


def multiply(
    x: Tensor,
    packed: PackedTensor,
    bias: Tensor | None,
    out: Tensor,
    scratch: Tensor,
    on_threads: OnThreads,
    integer: bool = False,
) -> None:
    """Writes x [T, K] times packed [N, K] transposed plus bias [N] into `out` [T, N], all bfloat16.

    `out` has adjacent columns. `scratch` is uint8, row_nbytes(K) bytes for each of at least one row. With `integer`,
    each 32 columns of a row are rounded to int8 with a scale of their own, if the codes are of INTEGER_CODES.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    kernel = function("moedge_multiply", POINTER(NativeProduct))
    at_once = min(MOST_ROWS, scratch.numel() // row_nbytes(x.shape[1]))
    product = native_product(x, packed, bias, out, scratch, integer)
    for first in range(0, x.shape[0], at_once):
        counters = _Counters()
        product.x = x.data_ptr() + 2 * first * x.stride(0)
        product.y = out.data_ptr() + 2 * first * out.stride(0)
        product.rows = min(at_once, x.shape[0] - first)
        product.counters = addressof(counters)
        on_threads(partial(kernel, byref(product)))


def native_product(
    x: Tensor, packed: PackedTensor, bias: Tensor | None, out: Tensor, scratch: Tensor, integer: bool = False
) -> NativeProduct:
    """A product as the kernel takes it, without rows and counters; `integer` as for multiply."""
    return NativeProduct(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        y=out.data_ptr(),
        y_stride=out.stride(0),
        scratch=scratch.data_ptr(),
        weights=native_matrix_of(packed),
        bias=_address(bias),
        integers=integer,
    )


class ExpertRows(NamedTuple):
    """An expert's matrices and biases, and which rows of the groups are its own."""

    first: int
    num_rows: int
    up: PackedTensor
    up_bias: Tensor | None
    down: PackedTensor
    down_bias: Tensor | None


def takes_experts(hidden: Tensor, experts: Sequence[ExpertRows], gate: Gate | None, scratch_nbytes: int) -> bool:
    """Whether `multiply_experts` can be used with such scratch; all experts have matrices of the same layouts."""
    if gate is None or gate.activation not in ACTIVATIONS or hidden.stride(1) != 1:
        return False
    up, down = experts[0].up, experts[0].down
    enough = scratch_nbytes >= row_nbytes(up.shape[1]) + row_nbytes(down.shape[1])
    return enough and takes(hidden, up) and takes(hidden, down) and up.shape[0] == 2 * down.shape[1]


def multiply_experts(
    hidden: Tensor,
    token_ids: Tensor,
    experts: Sequence[ExpertRows],
    gate: Gate,
    out: Tensor,
    scratch: Tensor,
    on_threads: OnThreads,
    integer: bool = False,
) -> None:
    """Writes the outputs of experts for their rows into those rows of `out` [P, D].

    Row r of the groups is hidden[token_ids[r]], hidden [T, D]; see multiply.
    """
    up, down = experts[0].up, experts[0].down
    of_row = row_nbytes(up.shape[1]) + row_nbytes(down.shape[1])
    mixture = native_mixture(hidden, token_ids, out, scratch, gate, integer)
    for some in _calls(experts, scratch.numel() // of_row):
        jobs, counters = (NativeJob * len(some))(), _Counters()
        offset = 0
        for job, rows in zip(jobs, some, strict=True):
            job.first_row, job.rows, job.scratch_offset = rows.first, rows.num_rows, offset
            job.expert = native_expert((rows.up, rows.up_bias, rows.down, rows.down_bias))
            offset += rows.num_rows * of_row
        mixture.num_jobs, mixture.jobs, mixture.counters = len(jobs), addressof(jobs), addressof(counters)
        on_threads(partial(function("moedge_experts", POINTER(NativeMixture)), byref(mixture)))


def native_mixture(
    hidden: Tensor, token_ids: Tensor, out: Tensor, scratch: Tensor, gate: Gate, integer: bool
) -> NativeMixture:
    """The rows of experts as the kernel takes them, without jobs and counters."""
    return NativeMixture(
        hidden=hidden.data_ptr(),
        hidden_stride=hidden.stride(0),
        token_ids=token_ids.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        scratch=scratch.data_ptr(),
        activation=ACTIVATIONS[gate.activation],
        alternating=gate.alternating,
        integers=integer,
    )


def _calls(experts: Sequence[ExpertRows], most: int) -> list[list[ExpertRows]]:
    """Runs of at most MOST_ROWS rows of one expert, in lists of at most `most` rows."""
    calls: list[list[ExpertRows]] = [[]]
    taken, at_once = 0, min(MOST_ROWS, most)
    for one in experts:
        for first in range(0, one.num_rows, at_once):
            rows = min(at_once, one.num_rows - first)
            if taken + rows > most:
                calls.append([])
                taken = 0
            calls[-1].append(one._replace(first=one.first + first, num_rows=rows))
            taken += rows
    return calls


def native_expert(matrices: ExpertMatrices) -> NativeExpert:
    """An expert as the kernel takes it."""
    up, up_bias, down, down_bias = matrices
    return NativeExpert(native_matrix_of(up), native_matrix_of(down), _address(up_bias), _address(down_bias))


def native_matrix_of(packed: PackedTensor) -> NativeMatrix:
    """A matrix in order `tiles` as kernels take it."""
    if not packed.native:
        packed.native.append(native_matrix(packed.layout.codes, packed.planes, packed.shape[1]))
    made: NativeMatrix = packed.native[0]
    return made


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
