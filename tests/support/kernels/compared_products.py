"""Products with packed matrices against float64, in every way in which a job computes them and in published sizes.

A difference is measured where a fault shows: number by number, in units of the rounding that a sum of such products
has, so that one column of ten thousand that is left out is found, and so is one wrong row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from moedge.quant.formats import bitsandbytes_kernels
from moedge.quant.formats.format import FORMATS, INTEGER_CODES, NF4PACK, ROWS, TILES, get_format
from moedge.quant.matmul import tiled
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.matmul.row_layouts import reads_floats
from moedge.quant.scratch import row_nbytes, scratch_nbytes
from moedge.quant.tensor import PackedTensor, Planes, dtype_name, pack
from support.kernels.relayout import from_planes

from ..published_widths import VOCABULARIES, widths
from ..random_planes import defined, random_planes

# Rows of activations: one, those at which kernels take other loops, and any.
ROW_COUNTS = st.sampled_from([1, 2, 3, 7, 12, 13, 24, 25, 30, 47, 48, 49, 97, 129, 140]) | st.integers(1, 140)
# The numbers of the largest matrix.
MOST_NUMEL = 1 << 20


class Way(NamedTuple):
    """A way to compute products: the order of codes ("" for the format's own), and the settings of Matmul."""

    order: str = ""
    deterministic: bool = False
    integer: bool = False
    limits: Mapping[str, int] | None = MappingProxyType({})
    dtype: torch.dtype = torch.bfloat16


# By name. `tiles` and `strips` are what `--deterministic` takes, `floats` what bfloat16 takes with AVX2 alone,
# `widened` what long prompts take on matrix units, and `codes` what few rows take in orders that have kernels of torch
# or bitsandbytes.
WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "tiles": Way(TILES, deterministic=True),
        "tiles int8": Way(TILES, integer=True, limits=None),
        "widened": Way(TILES),
        "floats": Way(limits=None),
        "strips": Way(deterministic=True),
        "strips float32": Way(deterministic=True, dtype=torch.float32),
        "strips float16": Way(dtype=torch.float16),
        "fast strips": Way(),
        "rows": Way(ROWS),
        "codes": Way(limits=None),
        "fused": Way(NF4PACK, limits=None),
        "rows int8": Way(ROWS, integer=True),
    }
)


def ways_of(name: str, library: bool) -> list[str]:
    """The ways in which the library multiplies matrices of a format on this machine, or all others."""
    chosen = get_format(name)
    if library:
        if not chosen.scales:
            return ["floats"] if reads_floats() else []
        known = TILES in chosen.orders and tiled.has_kernel()
        return [] if not known else ["tiles", "widened"] + (["tiles int8"] if chosen.codes in INTEGER_CODES else [])
    found = ["strips", "strips float32", "strips float16", "fast strips"]
    if not chosen.scales:
        return found
    found += ["codes"] + (["rows"] if chosen.order != ROWS and not chosen.block else [])
    found += ["fused"] if NF4PACK in chosen.orders and bitsandbytes_kernels.has_fused() else []
    return found + (["rows int8"] if chosen.whole_rows else [])


class Case(NamedTuple):
    """A product of `num_rows` rows with a matrix of this shape, in all of `ways`."""

    format: str
    ways: tuple[str, ...]
    shape: tuple[int, int]
    num_rows: int
    biased: bool = False
    seed: int = 0


def compare(case: Case, threads: int = 2) -> float:
    """How far products are from their definition: at most 1, which is what roundings may make of them."""
    chosen, (num_outputs, num_columns) = get_format(case.format), case.shape
    weight, planes = _numbers(*case.shape, case.seed), None
    if chosen.scales:
        planes = random_planes(chosen, case.shape, case.seed)
        weight = defined(chosen, planes)
    x = _numbers(case.num_rows, num_columns, case.seed + 1)
    bias = _numbers(1, num_outputs, case.seed + 2)[0] if case.biased else None
    worst = 0.0
    for name in case.ways:
        way = WAYS[name]
        packed = _packed(chosen.name, planes, weight, way)
        found = _compute(way, packed, x, threads).linear(
            x.to(way.dtype), packed, None if bias is None else bias.to(way.dtype)
        )
        given = _rounded(x, packed) if way.integer else x.double()
        worst = max(worst, _distance(case.format, name, found, given, weight.double(), bias))
    return worst


def _numbers(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _distance(format_name: str, name: str, found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    product, spread = x @ weight.t(), (x.square() @ weight.square().t()).sqrt()
    wanted = product if bias is None else product + bias.double()
    rounded = wanted.abs() + (0 if bias is None else product.abs())
    roundings = _roundings(format_name, name) * torch.finfo(WAYS[name].dtype).eps * 0.51
    allowed = bound_of(format_name, name) * spread + roundings * rounded
    return float(((found.double() - wanted).abs() / allowed.clamp(min=1e-30)).max().nan_to_num(torch.inf))


def _roundings(format_name: str, name: str) -> int:
    """How often a result is rounded: of int8 with a scale per row a sum, that scale and their product may be."""
    way = WAYS[name]
    return 3 if get_format(format_name).whole_rows and not (way.integer or way.order == TILES) else 1


def bound_of(format_name: str, name: str) -> float:
    """What roundings of weights and sums may make of a result, in units of the spread of its sum."""
    way, codes = WAYS[name], get_format(format_name).codes
    if way.integer:
        return 1e-4
    if way.dtype == torch.float32:
        return 4e-5
    if name == "floats" or (way.order == TILES and way.deterministic):
        # Codes are exact, nf4's levels are rounded.
        return 0.012 if codes == "nf4" else 1e-4
    if way.dtype == torch.float16:
        return 0.004
    # Weights, or a scale and an offset that nearly cancel, are rounded to bfloat16.
    return 0.04 if codes == "int4" else 0.012


def _packed(format_name: str, planes: Planes | None, weight: Tensor, way: Way) -> PackedTensor:
    if planes is None:
        return pack(weight.to(way.dtype), format_name)
    order = way.order or get_format(format_name).order
    return from_planes(format_name, planes, dtype_name(way.dtype), order)


def _compute(way: Way, packed: PackedTensor, x: Tensor, threads: int) -> ParallelMatmul:
    nbytes = scratch_nbytes(packed.layout, dtype_name(way.dtype), way.deterministic)
    sizes = [max(nbytes, 40 * row_nbytes(x.shape[1]))] * threads
    limits = {} if way.limits is None else {"gemv_max_rows": dict(way.limits)}
    helpers = [Workspace(each) for each in sizes[1:]]
    return ParallelMatmul(Workspace(sizes[0]), way.deterministic, way.integer, helpers=helpers, **limits)


def _rounded(x: Tensor, packed: PackedTensor) -> Tensor:
    """Activations as integers of 8 bits times their scale: each 32 columns of a row have one, or a whole row."""
    width = 32 if packed.layout.order == TILES else x.shape[1]
    chunks = x.float().reshape(len(x), -1, width)
    most = chunks.abs().amax(2, keepdim=True)
    # As kernels do, in float32 and without torch's reciprocal of a number over a tensor: which of two integers a number
    # in the middle becomes depends on that.
    inverse = torch.full_like(most, 127).div(most) if packed.layout.order == TILES else (most / 127).reciprocal()
    return ((most / 127).double() * (chunks * inverse).round().nan_to_num()).view(x.shape)


@st.composite
def cases(draw: st.DrawFn, library: bool) -> Case:
    """Products of the library, or those of torch and bitsandbytes.

    Kinds of codes are drawn first, so that each is drawn as often as the others, however many formats have it.
    """
    names = sorted(name for name in FORMATS if ways_of(name, library))
    kind = draw(st.sampled_from(sorted({_kind(name) for name in names})))
    name = draw(st.sampled_from([name for name in names if _kind(name) == kind]))
    columns = draw(widths(multiple_of(name, library), least=1 if library else 2))
    shape = draw(_outputs(library, columns)), columns
    return Case(name, usable(ways_of(name, library), shape), shape, draw(ROW_COUNTS), draw(st.booleans()),
                draw(st.integers(0, 99)))  # fmt: skip


def _kind(name: str) -> tuple[str, bool]:
    each = FORMATS[name]
    return each.codes, each.group is None


def multiple_of(name: str, library: bool) -> int:
    """What divides the columns of every matrix of a format, in order `tiles` with `library`."""
    chosen = get_format(name)
    return chosen.block or chosen.group or (32 if library else 1)


def usable(ways: Sequence[str], shape: tuple[int, int]) -> tuple[str, ...]:
    """The ways that take whole blocks of rows, where there are such."""
    return tuple(way for way in ways if WAYS[way].order != NF4PACK or shape[0] % 32 == 0)


def _outputs(library: bool, columns: int) -> SearchStrategy[int]:
    """Rows of a matrix: whole blocks in order `tiles`, else any, rests of vocabularies among them."""
    most = max(64, MOST_NUMEL // columns)
    blocks = st.integers(1, most // 64).map(lambda count: 64 * count)
    if library:
        return blocks
    rests = [rest for size in VOCABULARIES if (rest := size % 1024) and rest <= most]
    return blocks | st.integers(1, min(most, 700)) | st.sampled_from(rests or [1])
