"""The grouped product: rows that are grouped by matrix, times packed matrices, in one launch. Imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..formats.format import ROWS
from ..formats.nf4 import LEVELS
from ..tensor import PackedTensor
from .operands import Gate, Packed, ProductOperands, Sizes, Stack, Tiles
from .tuning import tile_rows, tiles_for
from .upload import upload

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Launch(NamedTuple):
    """A kernel, its grid, its arguments, and its numbers of warps and pipeline stages."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        """Launches the kernel on the current stream."""
        self.kernel[self.grid](*self.arguments, num_warps=self.warps, num_stages=self.stages)

    def compile(self) -> Any:
        """Compiles the kernel for the active driver's target and returns Triton's compiled kernel."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, num_warps=self.warps, num_stages=self.stages)


def dot_type(dtype: torch.dtype) -> Any:
    """The Triton dtype of the operands of products with activations of `dtype`.

    It is float32 in Triton's interpreter, which computes wrongly on the bit patterns of bfloat16.
    """
    return tl.float32 if triton.knobs.runtime.interpret else _TYPES[dtype]


@triton.jit
def activate(gate, up, NAME: tl.constexpr):
    """The gated activation called NAME of two tensors of one shape, in float32."""
    if NAME == "silu":
        result = gate * tl.sigmoid(gate) * up
    elif NAME == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u).
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate * tl.sigmoid(2.0 * u) * up
    else:
        tl.static_assert(NAME == "clamped_swiglu", "an activation that recognise() does not know")
        # gpt_oss: gate is clamped to at most 7, up to [-7, 7], and 1 is added to up.
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return result


@triton.jit
def grouped_product(x, token_ids, out, packed, levels, tiles, S: tl.constexpr):
    """Grid: (tiles, runs of S.outputs outputs). tiles int32 [n, 3]: matrix, first and last + 1 row of out [P, outputs].

    Row p of out is row token_ids[p] of x (row p if token_ids is None) times its matrix, plus bias, activated. Programs
    of one matrix and one run of outputs are neighbours, so that weights which they read twice are in the cache.
    """
    fields = tiles + tl.program_id(0) * 3
    matrix, begin, end = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    if begin >= end:
        # A tile without rows is a warm-up launch, whose matrix does not exist.
        return
    rows = begin + tl.arange(0, S.rows)
    live = rows < end
    sources = rows
    if token_ids is not None:
        sources = tl.load(token_ids + rows, mask=live, other=0)
    sources = sources.to(tl.int64) * S.num_columns
    outputs = tl.program_id(1) * S.outputs + tl.arange(0, S.outputs)
    OUTPUTS: tl.constexpr = S.num_rows if S.gate is None else S.num_rows // 2
    inside = outputs < OUTPUTS
    wanted = live[:, None] & inside[None, :]
    if S.gate is None:
        sums = multiply(x, sources, live, packed, levels, matrix, outputs, inside, S)
    else:
        sums = multiply_gated(x, sources, live, packed, levels, matrix, outputs, inside, S)
    target = rows.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def multiply(x, sources, live, packed, levels, matrix, outputs, inside, S: tl.constexpr):
    """x [S.rows, K] times the rows `outputs` of the matrix: float32 [S.rows, S.outputs]."""
    sums = tl.full((S.rows, S.outputs), 0.0, tl.float32)
    for start in range(0, S.num_columns, S.depth):
        inputs = load_inputs(x, sources, live, start, S)
        weights = load_weights(packed, levels, matrix, outputs, inside, start, S)
        sums = tl.dot(inputs, tl.trans(weights), sums, input_precision="ieee")
    return finish(sums, packed, matrix, outputs, inside, S)


@triton.jit
def multiply_gated(x, sources, live, packed, levels, matrix, outputs, inside, S: tl.constexpr):
    """As `multiply`, for two rows of the matrix per output, to whose products the gated activation is applied."""
    gates = outputs * 2 if S.gate.alternating else outputs
    ups = gates + 1 if S.gate.alternating else gates + S.num_rows // 2
    sums = tl.full((S.rows, S.outputs), 0.0, tl.float32)
    others = tl.full((S.rows, S.outputs), 0.0, tl.float32)
    for start in range(0, S.num_columns, S.depth):
        inputs = load_inputs(x, sources, live, start, S)
        weights = load_weights(packed, levels, matrix, gates, inside, start, S)
        sums = tl.dot(inputs, tl.trans(weights), sums, input_precision="ieee")
        weights = load_weights(packed, levels, matrix, ups, inside, start, S)
        others = tl.dot(inputs, tl.trans(weights), others, input_precision="ieee")
    sums = finish(sums, packed, matrix, gates, inside, S)
    others = finish(others, packed, matrix, ups, inside, S)
    # Triton 3.6 does not accept an attribute that is a string as a constant.
    ACTIVATION: tl.constexpr = S.gate.activation
    return activate(sums, others, ACTIVATION)


@triton.jit
def start_of(stack, matrix):
    """The pointer to the first element of a matrix of a stack.

    By the multiplication with a constant, every version of Triton knows that the offset is a multiple of 16 bytes, so
    that loads are wide; some versions lose a hint (tl.multiple_of).
    """
    STEP: tl.constexpr = 128 // stack.base.dtype.element_ty.primitive_bitwidth
    return stack.base + tl.load(stack.shifts + matrix) * STEP


@triton.jit
def load_inputs(x, sources, live, start, S: tl.constexpr):
    """Activations [S.rows, S.depth] in S.dtype, from column `start` on."""
    columns = start + tl.arange(0, S.depth)
    mask = live[:, None] & (columns < S.num_columns)[None, :]
    return tl.load(x + sources[:, None] + columns[None, :], mask=mask, other=0).to(S.dtype)


@triton.jit
def load_weights(packed, levels, matrix, outputs, inside, start, S: tl.constexpr):
    """Weights [S.outputs, S.depth] in S.dtype; those of int8 with a scale per row unscaled: `finish` applies it."""
    codes = start_of(packed.codes, matrix)
    if S.group and S.codes != "int8":
        WIDTH: tl.constexpr = S.num_columns // 2
        columns = start // 2 + tl.arange(0, S.depth // 2)
        offsets = outputs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        pairs = tl.load(codes + offsets, mask=inside[:, None], other=0)
        weights = tl.reshape(unpack(pairs, levels, S), (S.outputs, S.depth))
    else:
        columns = start + tl.arange(0, S.depth)
        offsets = outputs.to(tl.int64)[:, None] * S.num_columns + columns[None, :]
        mask = inside[:, None] & (columns < S.num_columns)[None, :]
        weights = tl.load(codes + offsets, mask=mask, other=0)
    if S.group:
        weights = scale(weights.to(tl.float32), packed, matrix, outputs, inside, start, S)
    return weights.to(S.dtype)


@triton.jit
def unpack(pairs, levels, S: tl.constexpr):
    """The values of the two codes of every byte, float32, on a new last axis; of integers the codes themselves."""
    if S.codes == "nf4":
        # The first of two weights is in the high bits.
        values = tl.join(tl.load(levels + (pairs >> 4)), tl.load(levels + (pairs & 15)))
    elif S.codes == "e2m1":
        values = tl.join(widen_e2m1(pairs & 15), widen_e2m1(pairs >> 4))
    else:
        values = tl.join((pairs & 15).to(tl.float32), (pairs >> 4).to(tl.float32))
    return values


@triton.jit
def scale(weights, packed, matrix, outputs, inside, start, S: tl.constexpr):
    """Applies the scales and zeros of the group of column `start` (formats.format.WeightFormat) to float32 values."""
    scales = load_groups(packed.scales, matrix, outputs, inside, start, S)
    if S.codes != "int4":
        weights *= scales[:, None]
    elif packed.zeros is None:
        weights = (weights - 8.0) * scales[:, None]
    else:
        zeros = load_groups(packed.zeros, matrix, outputs, inside, start, S)
        if S.block:
            factors = start_of(packed.factors, matrix)
            factors += (outputs.to(tl.int64) * (S.num_columns // S.block) + start // S.block) * 2
            scales *= tl.load(factors, mask=inside, other=0).to(tl.float32)
            zeros *= tl.load(factors + 1, mask=inside, other=0).to(tl.float32)
            weights = weights * scales[:, None] - zeros[:, None]
        elif packed.zeros.base.dtype.element_ty == tl.uint8:
            weights = (weights - zeros[:, None]) * scales[:, None]
        else:
            weights = (weights - 8.0) * scales[:, None] + zeros[:, None]
    return weights


@triton.jit
def widen_e2m1(codes):
    """The values of uint8 codes seem in float32, exactly.

    As the upper bits of a float16 they are 2^14 times smaller, subnormal numbers included.
    """
    wide = codes.to(tl.int16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def load_groups(plane, matrix, outputs, inside, start, S: tl.constexpr):
    """The numbers of a plane [N, K/group] for the group of column `start`, float32 [S.outputs]."""
    groups = outputs.to(tl.int64) * (S.num_columns // S.group) + start // S.group
    numbers = tl.load(start_of(plane, matrix) + groups, mask=inside, other=0)
    if S.codes == "e2m1":
        # e8m0: the exponent of a float32; 2^-127 is subnormal.
        exponents = numbers.to(tl.int32)
        numbers = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def finish(sums, packed, matrix, outputs, inside, S: tl.constexpr):
    """Applies the scales of int8's rows and adds biases."""
    if S.codes == "int8" and not S.group:
        scales = start_of(packed.scales, matrix)
        sums *= tl.load(scales + outputs, mask=inside, other=0.0)[None, :]
    if packed.biases is not None:
        biases = start_of(packed.biases, matrix)
        sums += tl.load(biases + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    return sums


class RowTiles(NamedTuple):
    """Which rows of the output belong to which matrix.

    `tiles` is int32 [n, 3] of (matrix, first row, last row + 1), each of at most `height` rows.
    """

    tiles: torch.Tensor
    height: int


class GroupedProduct:
    """Launches the kernel on one device, where it keeps the table of nf4's levels.

    `deterministic` makes the bits of a row depend on that row alone.
    """

    def __init__(self, device: torch.device | str, deterministic: bool = False) -> None:
        self.levels = torch.tensor(LEVELS, device=device)
        self.deterministic = deterministic

    def rows(self, spans: Sequence[slice], x: torch.Tensor) -> RowTiles:
        """The rows for launches in which matrix i computes the rows spans[i] of the output from activations like x."""
        tiles, height = self._tiles(spans, x)
        return RowTiles(upload(torch.tensor(tiles, dtype=torch.int32), x.device), height)

    def upload(self, spans: Sequence[slice], x: torch.Tensor, *sides: ProductOperands) -> tuple[RowTiles, list[Packed]]:
        """The rows as `rows` has them and the operands of several launches, with one copy to the device."""
        tiles, height = self._tiles(spans, x)
        runs = [side.runs for side in sides]
        stacks, fields = Stack.all_of([tensors for each in runs for tensors in each], tiles)
        ends = accumulate(map(len, runs))
        packed = [side.packed(stacks[end - len(each) : end]) for side, each, end in zip(sides, runs, ends, strict=True)]
        return RowTiles(fields, height), packed

    def _tiles(self, spans: Sequence[slice], x: torch.Tensor) -> tuple[Tiles, int]:
        """Tiles, and their height, which does not depend on the rows if results must not."""
        mean = 1 if self.deterministic else sum(span.stop - span.start for span in spans) / len(spans)
        height = tile_rows(mean, wide=x.dtype == torch.float32)
        tiles = [
            (matrix, first, min(first + height, span.stop))
            for matrix, span in enumerate(spans)
            for first in range(span.start, span.stop, height)
        ]
        return tiles, height

    def takes(self, matrices: Sequence[PackedTensor]) -> bool:
        """Whether the kernel supports them: matrices of one layout, row after row, with N a multiple of 8.

        The last is needed because adjacent biases must begin at multiples of STEP_NBYTES.
        """
        layout = matrices[0].layout
        known = layout.order == ROWS and layout.shape[0] % 8 == 0
        return known and all(matrix.layout == layout for matrix in matrices)

    def launch(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        matrices: Sequence[PackedTensor],
        biases: Sequence[torch.Tensor | None],
        rows: RowTiles,
        token_ids: torch.Tensor | None = None,
        gate: Gate | None = None,
        packed: Packed | None = None,
    ) -> Launch:
        """out[p] = x[token_ids[p]] (x[p] without token_ids) times the matrix of row p, activated by `gate`.

        x [T, K], token_ids int64 [P], out [P, N], or [P, N/2] with a gate; matrices [N, K] of one layout; biases [N],
        for all matrices or for none. `packed` are both on the device, if they were uploaded already.
        """
        layout, side = matrices[0].layout, ProductOperands(matrices, biases)
        packed = packed or side.packed(Stack.all_of(side.runs)[0])
        cut = tiles_for(rows.height, layout, wide=x.dtype == torch.float32)
        grouping = layout.codes, layout.group if layout.grouped else 0, layout.block
        sizes = Sizes(*grouping, *layout.shape, gate, cut.rows, cut.outputs, cut.depth, dot_type(x.dtype))
        grid = (len(rows.tiles), triton.cdiv(out.shape[1], cut.outputs))
        arguments = (x.contiguous(), token_ids, out, packed, self.levels, rows.tiles, sizes)
        return Launch(grouped_product, grid, arguments, cut.warps, cut.stages)
