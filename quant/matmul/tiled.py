"""Products with matrices in order `tiles`, by the kernels of quant/native: one matrix, or all experts of a pass.

Every thread of a pool calls the same C function with the same arguments, and each takes the next item (a tile of a
matrix and the rows that it is multiplied by) from a counter that they share. A row's bits depend on neither the other
rows nor the threads (native/tiles.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, addressof, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.format import INTEGER_CODES, TILES
from ..kernels.operands import Gate
from ..native.library import available, function
from ..native.tiles import matrix_numbers
from ..scratch import row_nbytes
from ..tensor import PackedTensor

# Calls a function on every thread of a pool, and returns when all calls have ended.
OnThreads = Callable[[Callable[[], None]], None]
# An expert's matrices, each with its bias.
ExpertMatrices = tuple[PackedTensor, Tensor | None, PackedTensor, Tensor | None]
# A C function of the address of its arguments.
Kernel = Callable[[int], None]
# The rows that a kernel multiplies together; tiles.h has the same number.
MOST_ROWS = 128
# Added to the type of values where rows are rounded to integers, as in tiles.h.
_INTEGERS = 8
# An enum of products.cpp.
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}
# Two counters, each in a cache line of its own.
_COUNTERS = 16


def has_kernel() -> bool:
    """Whether matrices in order `tiles` can be multiplied without dequantizing them first."""
    return available()


def takes(x: Tensor, packed: PackedTensor) -> bool:
    """Whether `multiply` can be used for such rows and such a matrix."""
    return packed.layout.order == TILES and x.dtype == torch.bfloat16 and x.device.type == "cpu" and available()


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
    kernel, described = _functions()[0], describe(packed, bias, integer)
    at_once = min(MOST_ROWS, scratch.numel() // row_nbytes(x.shape[1]))
    for first in range(0, x.shape[0], at_once):
        rows = min(at_once, x.shape[0] - first)
        given = (c_int64 * (7 + len(described) + _COUNTERS))(
            x.data_ptr() + 2 * first * x.stride(0),
            x.stride(0),
            out.data_ptr() + 2 * first * out.stride(0),
            out.stride(0),
            rows,
            scratch.data_ptr(),
            0,
            *described,
        )
        _run(kernel, given, 6, on_threads)


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
    most = scratch.numel() // of_row
    for jobs in _calls(experts, most):
        given = _experts_arguments(hidden, token_ids, jobs, gate, out, scratch, of_row, integer)
        _run(_functions()[1], given, 10, on_threads)


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


def _experts_arguments(
    hidden: Tensor,
    token_ids: Tensor,
    jobs: Sequence[ExpertRows],
    gate: Gate,
    out: Tensor,
    scratch: Tensor,
    of_row: int,
    integer: bool,
) -> Array[c_int64]:
    described: list[int] = []
    offset = 0
    for job in jobs:
        described += (job.first, job.num_rows, offset)
        described += describe(job.up, job.up_bias, integer)
        described += describe(job.down, job.down_bias, integer)
        offset += job.num_rows * of_row
    given = (c_int64 * (11 + len(described) + _COUNTERS))(
        hidden.data_ptr(),
        hidden.stride(0),
        token_ids.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        scratch.data_ptr(),
        ACTIVATIONS[gate.activation],
        gate.alternating,
        len(jobs),
        0,
        0,
        *described,
    )
    given[9] = addressof(given) + 8 * 11
    return given


def _run(kernel: Kernel, given: Array[c_int64], counters: int, on_threads: OnThreads) -> None:
    """Calls a kernel whose argument `counters` is the address of its counters, the last numbers of `given`."""
    address = addressof(given)
    given[counters] = address + 8 * (len(given) - _COUNTERS)
    on_threads(lambda: kernel(address))


def describe(packed: PackedTensor, bias: Tensor | None, integer: bool = False) -> tuple[int, ...]:
    """A bias and a matrix as `Matrix` in tiles.h has them; `integer` as for multiply."""
    if not packed.described:
        packed.described[:] = matrix_numbers(packed.layout.codes, packed.planes, packed.shape[1])
    *matrix, values, scales_kind = packed.described
    if integer and packed.layout.codes in INTEGER_CODES:
        values += _INTEGERS
    return (0 if bias is None else bias.data_ptr(), *matrix, values, scales_kind)


@cache
def _functions() -> tuple[Kernel, Kernel]:
    return function("moedge_multiply", [c_void_p]), function("moedge_experts", [c_void_p])
