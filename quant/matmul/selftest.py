"""Compares products that a job is about to call with their definition: the matrix dequantized in torch, float32 sums.

Inputs are such that one column of a matrix that is left out, or read twice, exceeds the bound, however wide it is: each
row has numbers in a few adjacent columns only, all rows together in all of them, and errors are those of single rows.
"""

from __future__ import annotations

from contextvars import ContextVar
from itertools import accumulate, pairwise
from math import lcm
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.format import TILE_COLUMNS, Layout, get_format
from ..kernels.operands import ACTIVATIONS, Gate
from ..scratch import row_nbytes, scratch_nbytes
from ..tensor import CODECS, PackedTensor, bind_cleared, dtype_name, library_packs, pack_by_library, torch_dtype
from .matmul import GEMV_MAX_ROWS, ParallelMatmul, Workspace
from .tiled import MOST_ROWS, ExpertRows

# The most by which a row of a product may differ from its definition, relative L2: 4 units of roundoff of the dtype
# that it is computed in. In float32, where the order of sums decides, ten times less than what wrong numbers give.
BOUNDS = {"float32": 1e-4, "float16": 2.0**-9, "bfloat16": 2.0**-6}
# Rows of products: kernels read codes for few rows, in two halves for more, and widen them for many; the last number
# takes two calls, and strips of a dequantized matrix where those are faster.
ROW_COUNTS = (1, 5, 19, MOST_ROWS + 5)
# Scratch of a product, in rows.
_SCRATCH_ROWS = MOST_ROWS + 32
# Rows of a matrix that are tried of a larger one, beside as many as are left over: the most that one launch takes at a
# time, and the tiles that a thread does (products.cpp), whose codes have so many bytes.
_MATRIX_ROWS, _ITEM_NBYTES = 64, 1 << 16
GATE = Gate("silu")
# Set while kernels are used that differ from their definition, too, by those who measure by how much.
ANY_KERNEL: ContextVar[bool] = ContextVar("ANY_KERNEL", default=False)


class Wrong(NamedTuple):
    """What differs from its definition: by `error`, where `bound` is the most. An error may be NaN."""

    what: str
    error: float
    bound: float

    def __str__(self) -> str:
        return f"{self.what} differs by {self.error:.1e}, wanted at most {self.bound:.1e}"


def trimmed(layout: Layout) -> Layout:
    """The layout of fewer rows, as many of which are left over by any unit of rows that kernels take at a time."""
    rows, columns = layout.shape
    tile = layout.row_block * (columns if layout.codes == "int8" else columns // 2)
    unit = lcm(_MATRIX_ROWS, max(1, _ITEM_NBYTES // tile) * layout.row_block)
    least = min(rows, unit + rows % unit)
    return get_format(layout.format).in_order(layout.order).layout((least, columns), layout.dtype)


def random_matrix(layout: Layout, seed: int = 0) -> PackedTensor:
    """A matrix of any codes, with scales about 1/16, and zeros and factors that its format may have."""
    generator = torch.Generator().manual_seed(seed)
    packed = PackedTensor.bind(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    whole = layout.block > 0
    for plane, tensor in zip(layout.planes, packed.planes, strict=True):
        if plane.name == "codes" and not tensor.is_floating_point():
            low, high = (-127, 128) if tensor.dtype == torch.int8 else (0, 256)
            tensor.copy_(torch.randint(low, high, tensor.shape, generator=generator))
        elif tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=generator) + 0.5
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1 if layout.codes == "none" else 1
            size = 16 if plane.name != "factors" else 2048 if layout.paired else 512
            tensor.copy_(drawn * signs / size)
        else:
            # Zero points; integer scales of blocks, or with zeros beside them; exponents of e8m0.
            scales = (1, 64) if whole else (64, 192) if layout.paired else (120, 126)
            low, high = (0, 16) if plane.name == "zeros" else scales
            tensor.copy_(torch.randint(low, high, tensor.shape, generator=generator))
    return packed


def definition(packed: PackedTensor) -> Tensor:
    """The matrix [N, K], float32, by torch: no kernel widens to float32."""
    return packed.dequantize(torch.empty(packed.shape))


def banded(num_rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Rows [T, K] of which row t has numbers in the t-th of T parts of the columns only; two rows differ in order."""
    x = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(seed))
    part = torch.arange(columns) * num_rows // columns
    return torch.where(part == torch.arange(num_rows)[:, None], x, 0.0).to(dtype)


def rounded(x: Tensor, columns: int) -> Tensor:
    """x [T, K] in float32, each `columns` of a row rounded to integers of 8 bits with a scale; x itself for 0."""
    if not columns:
        return x.float()
    chunks = x.float().reshape(len(x), -1, columns)
    steps = chunks.abs().amax(2, keepdim=True).clamp(min=1e-30) / 127
    found: Tensor = ((chunks / steps).round() * steps).view(x.shape)
    return found


def errors(found: Tensor, wanted: Tensor) -> Tensor:
    """The relative L2 distance of each row [T]; NaN where one has a NaN, 0 where both are 0."""
    size = wanted.float().norm(dim=-1)
    difference: Tensor = (found.float() - wanted.float()).norm(dim=-1)
    relative: Tensor = difference / size.clamp(min=torch.finfo(torch.float32).tiny)
    return relative


def product_errors(x: Tensor, packed: PackedTensor, out: Tensor, compute: ParallelMatmul, weight: Tensor) -> Tensor:
    """By row, how far `out` [T, N] is from x [T, K] times `weight`, the definition of `packed` [N, K] transposed."""
    return errors(out, rounded(x, compute.rounded_columns(x, packed)) @ weight.t())


class Arithmetic(NamedTuple):
    """How a job computes: the dtype of activations, whether they are rounded to int8, and whether bits depend on a row
    alone."""

    dtype: torch.dtype
    integer: bool = False
    deterministic: bool = False

    def products(self, *layouts: Layout, by_kernels: bool = True) -> ParallelMatmul:
        """Products with such matrices; without kernels on codes, matrices are dequantized first."""
        rows = _SCRATCH_ROWS * sum(row_nbytes(layout.shape[1]) for layout in layouts)
        nbytes = [scratch_nbytes(layout, dtype_name(self.dtype), self.deterministic) for layout in layouts]
        limits = GEMV_MAX_ROWS if by_kernels else {}
        return ParallelMatmul(Workspace(max(rows, *nbytes)), self.deterministic, self.integer, limits)

    def name(self, layout: Layout) -> str:
        rounded = " and activations in int8" if self.integer else ""
        return f"a matrix {list(layout.shape)} in {layout.format}{rounded}"


@torch.inference_mode()
def wrong_product(layout: Layout, how: Arithmetic) -> Wrong | None:
    """The first number of rows for which a product with a matrix of this layout is beyond the bound, if any."""
    packed, columns = random_matrix(trimmed(layout)), layout.shape[1]
    weight, bound = definition(packed), BOUNDS[dtype_name(how.dtype)]
    by_kernels, dequantizing = how.products(layout), how.products(layout, by_kernels=False)
    cases = [(by_kernels, banded(rows, columns, how.dtype)) for rows in ROW_COUNTS]
    # One row has numbers in all columns, among which a missing one of many would not show: here it has few.
    last = cases[0][1][:, -TILE_COLUMNS:]
    cases += [(by_kernels, F.pad(last, (columns - last.shape[1], 0))), (dequantizing, cases[2][1])]
    for compute, x in cases:
        out = x.new_full((len(x), len(weight)), float("nan"))
        compute.linear(x, packed, out=out)
        error = float(product_errors(x, packed, out, compute, weight).max())
        # Negated, since every comparison with NaN is false.
        if not error <= bound:
            return Wrong(f"a product of {len(x)} rows with {how.name(layout)}", error, bound)
    return None


@torch.inference_mode()
def wrong_experts(up: Layout, down: Layout, how: Arithmetic) -> Wrong | None:
    """Does the same for experts in one call, whose first and second matrices have these layouts, with fewer rows."""
    dtype, group = how.dtype, down.group if down.grouped else TILE_COLUMNS
    # As many columns of the second matrix are left over by any unit up to 256, or the group.
    inner = min(down.shape[1], (unit := max(256, group)) + down.shape[1] % unit)
    ups = get_format(up.format).in_order(up.order).layout((2 * inner, up.shape[1]), up.dtype)
    downs = get_format(down.format).in_order(down.order).layout((down.shape[0], inner), down.dtype)
    compute, counts = how.products(ups, downs), (3, MOST_ROWS + 5)
    matrices = [(random_matrix(ups, seed), random_matrix(downs, seed + 9)) for seed in range(len(counts))]
    ends = list(accumulate(counts, initial=0))
    hidden = banded(ends[-1], up.shape[1], dtype)
    token_ids = torch.randperm(ends[-1], generator=torch.Generator().manual_seed(0))
    jobs = [
        ExpertRows(first, end - first, one, None, two, None)
        for (first, end), (one, two) in zip(pairwise(ends), matrices, strict=True)
    ]
    out = torch.full((ends[-1], down.shape[0]), float("nan"), dtype=dtype)
    if not compute.experts(hidden, token_ids, jobs, GATE, out):
        return None
    # Two products after one another, and the rounding of what is between them.
    bound, worst = 3 * BOUNDS[dtype_name(dtype)], 0.0
    for job in jobs:
        rows = hidden[token_ids[job.first : job.first + job.num_rows]]
        gated = rounded(rows, compute.rounded_columns(rows, job.up)) @ definition(job.up).t()
        between = ACTIVATIONS[GATE.activation](*gated.chunk(2, 1)).to(dtype)
        wanted = rounded(between, compute.rounded_columns(between, job.down)) @ definition(job.down).t()
        worst = max(worst, *errors(out[job.first : job.first + job.num_rows], wanted).nan_to_num(nan=1e9).tolist())
    return Wrong(f"a layer of experts of {how.name(up)}", worst, bound) if worst > bound else None


@torch.inference_mode()
def wrong_packing(layout: Layout) -> Wrong | None:
    """Whether the library packs other bytes than torch does, where it packs such matrices."""
    layout = trimmed(layout)
    weight = torch.randn(layout.shape, generator=torch.Generator().manual_seed(0)).to(torch_dtype(layout.dtype))
    if not library_packs(weight, layout):
        return None
    mine, wanted = (bind_cleared(layout, torch.zeros(layout.nbytes, dtype=torch.uint8)) for _ in range(2))
    pack_by_library(weight, layout, mine.planes)
    CODECS[layout.codes, layout.order].pack(weight, wanted.planes)
    different = [(one != two).float().mean() for one, two in zip(mine.planes, wanted.planes, strict=True)]
    what = f"packing {list(layout.shape)} to {layout.format}, in its share of numbers,"
    return Wrong(what, max(map(float, different)), 0.0) if any(different) else None


@torch.inference_mode()
def wrong_widening(layout: Layout) -> Wrong | None:
    """Whether a matrix of this layout is dequantized to other numbers than its definition, rounded once."""
    packed = random_matrix(trimmed(layout))
    error, bound = float(errors(packed.dequantize(), definition(packed)).max()), BOUNDS[layout.dtype]
    return None if error <= bound else Wrong(f"widening {list(layout.shape)} in {layout.format}", error, bound)
