"""Experts in order `rows`, in which GPUs read them, computed by a processor from where they lie in host memory.

The kernel (native/rows.cpp) is for few rows of each expert: it widens codes for every eight of them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, addressof, byref, c_int64
from functools import partial

import torch
from torch import Tensor

from ..formats.format import Layout
from ..kernels.operands import Gate
from ..native.library import CONSTANTS, ENUMS, NativeRowJob, NativeRowMatrix, NativeRowMixture, available, function
from ..tensor import PackedTensor
from .row_layouts import readable
from .tiled import ACTIVATIONS, ExpertRows, OnThreads

# Rows of an expert that are computed together; more are several jobs.
FEW_ROWS = CONSTANTS["few_rows"]
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_Counters = c_int64 * CONSTANTS["counters"]


def takes(up: Layout, down: Layout, gate: Gate | None) -> bool:
    """Whether `multiply_experts` computes experts of such matrices."""
    return gate is not None and gate.activation in ACTIVATIONS and available() and readable(up, down)


def scratch_numbers(up: Layout, down: Layout) -> int:
    """The float32 numbers of scratch that one row takes."""
    return up.shape[1] + down.shape[1]


def multiply_experts(
    hidden: Tensor,
    token_ids: Tensor,
    experts: Sequence[ExpertRows],
    gate: Gate,
    out: Tensor,
    scratch: Tensor,
    on_threads: OnThreads,
) -> None:
    """Writes the outputs of experts, all of the same layouts, for their rows into those rows of `out` [P, D].

    Row r of the groups is hidden[token_ids[r]], hidden [T, D] in any dtype of weights, as `out` and biases have it;
    all in host memory. `scratch` is float32, scratch_numbers() for each row of `experts`.
    """
    each = scratch_numbers(experts[0].up.layout, experts[0].down.layout)
    jobs, offset = [], 0
    for one in experts:
        up, down = _matrix(one.up), _matrix(one.down)
        biases = [bias if bias is None else bias.data_ptr() for bias in (one.up_bias, one.down_bias)]
        for first in range(0, one.num_rows, FEW_ROWS):
            rows = min(FEW_ROWS, one.num_rows - first)
            jobs.append(NativeRowJob(one.first + first, rows, offset, up, down, *biases))
            offset += rows * each
    listed, counters = (NativeRowJob * len(jobs))(*jobs), _Counters()
    mixture = NativeRowMixture(
        hidden=hidden.data_ptr(),
        hidden_stride=hidden.stride(0),
        token_ids=token_ids.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        scratch=scratch.data_ptr(),
        num_jobs=len(jobs),
        jobs=addressof(listed),
        counters=addressof(counters),
        format=ENUMS["format"][_FORMATS[hidden.dtype]],
        activation=ACTIVATIONS[gate.activation],
        alternating=gate.alternating,
    )
    on_threads(partial(function("moedge_row_experts", POINTER(NativeRowMixture)), byref(mixture)))


def _matrix(packed: PackedTensor) -> NativeRowMatrix:
    """A matrix in order `rows` as kernels take it; made once, since that takes longer than a small product."""
    if not packed.native:
        packed.native.append(_native_matrix(packed))
    made: NativeRowMatrix = packed.native[0]
    return made


def _native_matrix(packed: PackedTensor) -> NativeRowMatrix:
    layout, (codes, *planes) = packed.layout, packed.planes
    dtype = str((planes or (codes,))[0].dtype).removeprefix("torch.")
    return NativeRowMatrix(
        codes=codes.data_ptr(),
        scales=planes[0].data_ptr() if planes else None,
        zeros=planes[1].data_ptr() if len(planes) > 1 and not layout.paired else None,
        factors=planes[1].data_ptr() if layout.paired else None,
        rows=layout.shape[0],
        columns=layout.shape[1],
        group=layout.group,
        codes_type=ENUMS["codes"].get(layout.codes, 0),
        scales_type=ENUMS["scales"]["pairs" if layout.paired else dtype],
    )
