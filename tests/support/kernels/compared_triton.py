"""Triton's kernels, in its interpreter or on a GPU, against float64 in published sizes."""

from __future__ import annotations

import os

import torch
from hypothesis import strategies as st

from moedge.quant.kernels.operands import Gate
from moedge.runtime.attention.choice import LARGEST_HEAD

from ..published_widths import EXPERTS, GROUP_SIZES, HEAD_DIMS, widths
from . import grouped_cases as grouped
from . import paged_cases as paged

_DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") != "0" else "cuda"
_GATES = (None, Gate("silu"), Gate("gelu_tanh"), Gate("clamped_swiglu", alternating=True))
# The kernels are not used for others.
_HEAD_DIMS = [dim for dim in HEAD_DIMS if dim <= LARGEST_HEAD]
# Of float32, whose sums have another order.
_MOST_ERROR = 4e-6


@st.composite
def grouped_cases(draw: st.DrawFn) -> grouped.Case:
    """Few rows of a matrix: the interpreter takes its time for a program."""
    name = draw(st.sampled_from(grouped.FORMATS))
    multiple = {"nf4": 64, "mxfp4": 32, "int4": 32, "int3": 32, "vq2": 64}.get(name, 8)
    # Half of the widths are no multiples of what a program reads at a time.
    odd = [width for width in (80, 96, 104, 144, 160, 352, 7688) if width % multiple == 0]
    columns = draw(widths(multiple, 1536) | st.sampled_from(odd) if odd else widths(multiple, 1536))
    chosen = draw(st.sampled_from(EXPERTS))[1]
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 16, 17, 20, 33]), min_size=1, max_size=min(4, chosen)))
    return grouped.Case(name, 8 * draw(st.integers(1, 13)), columns, (*counts, 1), draw(st.sampled_from([None, 7])),
                        draw(st.sampled_from(_GATES)), draw(st.booleans()), device=_DEVICE)  # fmt: skip


def compare_grouped(case: grouped.Case) -> float:
    """By row: one wrong row of many shows."""
    product = grouped.Product.make(case)
    product.launch().run()
    wanted = product.reference()
    errors = (product.out.cpu().double() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-9)
    return float(errors.max().nan_to_num(torch.inf)) / _MOST_ERROR


@st.composite
def paged_cases(draw: st.DrawFn) -> tuple[str, paged.Case]:
    """A kernel, and lengths that end in a block and a run of keys."""
    kinds, kernel = st.sampled_from(paged.KINDS), draw(st.sampled_from(paged.KERNELS))
    return kernel, paged.Case(
        draw(kinds), draw(kinds), draw(st.sampled_from(_HEAD_DIMS)), draw(st.sampled_from(GROUP_SIZES)),
        draw(st.sampled_from(paged.BLOCKS)), draw(st.integers(1, 2)), device=_DEVICE,
    )  # fmt: skip


def compare_paged(case: tuple[str, paged.Case]) -> float:
    kernel, sizes = case
    return paged.check(sizes, kernel) / _MOST_ERROR


def stored_cases() -> st.SearchStrategy[tuple[str, str, int]]:
    """Formats of keys and of values, and the size of a head."""
    return st.tuples(st.sampled_from(paged.KINDS), st.sampled_from(paged.KINDS), st.sampled_from(_HEAD_DIMS))


def compare_stored(case: tuple[str, str, int]) -> float:
    """The share of codes that the kernel stores otherwise than the codec, which may round a middle otherwise."""
    return paged.store_error(*case, _DEVICE) / 1e-3
