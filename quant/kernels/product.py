"""The grouped product: rows that are grouped by matrix, times packed matrices, in one launch. Imports Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..formats.format import ROWS, Layout
from ..tensor import PackedTensor, torch_dtype
from . import decode
from .decode import decode_int8, decode_pairs, decode_points, decode_threes, load_table, multiply_add, raise_bits
from .gpu import interpreted
from .operands import Gate, Packed, ProductOperands, Sizes, Stack, Tiles
from .tuning import TILE_ROWS, capability_of, tile_rows, tiles_for
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


# The number of rows changes while a job runs: no kernel may be compiled for each.
@triton.jit(do_not_specialize=["num_rows"])
def grouped_product(x, token_ids, out, packed, levels, tiles, num_rows, S: tl.constexpr):
    """Grid: (tiles, runs of S.outputs outputs). tiles int32 [n, 3]: matrix, first and last + 1 row of out [P, outputs];
    None: the first matrix computes all `num_rows` rows.

    Row p of out is row token_ids[p] of x (row p if token_ids is None) times its matrix, plus bias, activated. Programs
    of one matrix and one run of outputs are neighbours, so that weights which they read twice are in the cache.
    """
    if tiles is None:
        matrix, begin = 0, tl.program_id(0) * S.rows
        end = tl.minimum(begin + S.rows, num_rows)
    else:
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
    words = load_table(levels, S)
    if S.gate is None:
        sums = multiply(x, sources, live, packed, words, matrix, outputs, inside, S)
    else:
        sums = multiply_gated(x, sources, live, packed, words, matrix, outputs, inside, S)
    target = rows.to(tl.int64)[:, None] * OUTPUTS + outputs[None, :]
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def multiply(x, sources, live, packed, table, matrix, outputs, inside, S: tl.constexpr):
    """x [S.rows, K] times the rows `outputs` of the matrix: float32 [S.rows, S.outputs]."""
    place = (matrix, outputs, inside)
    sums = tl.full((S.rows, S.outputs), 0.0, tl.float32)
    PARTS: tl.constexpr = S.parts
    for start in range(0, S.num_columns, S.depth):
        scales = load_scales(packed, table, place, start, S)
        for part in tl.static_range(PARTS):
            begin = start + part * (S.depth // S.parts)
            inputs = load_inputs(x, sources, live, begin, S)
            sums = add_products(sums, inputs, packed, table, scales[part], place, begin, S, part)
    return finish(sums, packed, matrix, outputs, inside, S)


@triton.jit
def multiply_gated(x, sources, live, packed, table, matrix, outputs, inside, S: tl.constexpr):
    """As `multiply`, for two rows of the matrix per output, to whose products the gated activation is applied."""
    gates = outputs * 2 if S.gate.alternating else outputs
    ups = gates + 1 if S.gate.alternating else gates + S.num_rows // 2
    gate_place, up_place = (matrix, gates, inside), (matrix, ups, inside)
    sums = tl.full((S.rows, S.outputs), 0.0, tl.float32)
    others = tl.full((S.rows, S.outputs), 0.0, tl.float32)
    PARTS: tl.constexpr = S.parts
    for start in range(0, S.num_columns, S.depth):
        of_gates = load_scales(packed, table, gate_place, start, S)
        of_ups = load_scales(packed, table, up_place, start, S)
        for part in tl.static_range(PARTS):
            begin = start + part * (S.depth // S.parts)
            inputs = load_inputs(x, sources, live, begin, S)
            sums = add_products(sums, inputs, packed, table, of_gates[part], gate_place, begin, S, part)
            others = add_products(others, inputs, packed, table, of_ups[part], up_place, begin, S, part)
    sums = finish(sums, packed, matrix, gates, inside, S)
    others = finish(others, packed, matrix, ups, inside, S)
    # Triton 3.6 does not accept an attribute that is a string as a constant.
    ACTIVATION: tl.constexpr = S.gate.activation
    return activate(sums, others, ACTIVATION)


@triton.jit
def add_products(sums, inputs, packed, table, scales, place, start, S: tl.constexpr, PART: tl.constexpr):
    """sums [S.rows, S.outputs] plus the products of the columns from `start` on that share a scale.

    `place` is the matrix, the rows of it [S.outputs], and which of them exist.
    """
    if S.codes == "vq2":
        points = decode_points(scales[2], scales[3], table, S.parts - 1 - PART, S)
        for at in tl.static_range(4):
            weights = multiply_add(points[at], scales[0][:, None], scales[1][:, None], S)
            sums = tl.dot(inputs[at], tl.trans(weights), sums, input_precision="ieee")
    elif S.pairs:
        first, second = load_pairs(packed, table, scales, place, start, S, PART)
        sums = tl.dot(inputs[0], tl.trans(first), sums, input_precision="ieee")
        sums = tl.dot(inputs[1], tl.trans(second), sums, input_precision="ieee")
    else:
        weights = load_weights(packed, scales, place, start, S)
        sums = tl.dot(inputs, tl.trans(weights), sums, input_precision="ieee")
    return sums


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
    """Activations [S.rows, S.depth] in S.dtype, from column `start` on.

    Where several codes are a byte, those of even columns and those of odd ones, [S.rows, S.depth / 2] each: a product
    each needs no codes in another order. Of vq2 those of the first weights of the pairs of a byte, then of the second
    ones, [S.rows, 16] each.
    """
    if not S.pairs:
        columns = start + tl.arange(0, S.depth // S.parts)
        mask = live[:, None] & (columns < S.num_columns)[None, :]
        inputs = tl.load(x + sources[:, None] + columns[None, :], mask=mask, other=0).to(S.dtype)
    elif x.dtype.element_ty.primitive_bitwidth == 16 and S.dtype != tl.float32:
        words = x.to(tl.pointer_type(tl.int32), bitcast=True) + (sources // 2)[:, None] + words_of(start, S)[None, :]
        inputs = halves_of(words, live, S)
        if S.codes == "vq2":
            inputs = inputs + halves_of(words + 2, live, S)
    else:
        even = x + sources[:, None] + (2 * words_of(start, S))[None, :]
        inputs = both_of(even, live, S)
        if S.codes == "vq2":
            inputs = inputs + both_of(even + 4, live, S)
    return inputs


@triton.jit
def words_of(start, S: tl.constexpr):
    """Half of the even columns from `start` on that are multiplied apart; of vq2 the even ones of first weights."""
    if S.codes == "vq2":
        pairs = tl.arange(0, 16)
        words = start // 2 + pairs // 2 * 4 + pairs % 2
    else:
        words = start // 2 + tl.arange(0, S.depth // S.parts // 2)
    return words


@triton.jit
def both_of(even, live, S: tl.constexpr):
    """The numbers [S.rows, n] in S.dtype at pointers and at those behind them."""
    mask = live[:, None]
    return tl.load(even, mask=mask, other=0).to(S.dtype), tl.load(even + 1, mask=mask, other=0).to(S.dtype)


@triton.jit
def halves_of(words, live, S: tl.constexpr):
    """The first and the second number of 16 bits [S.rows, n] of each word in S.dtype."""
    both = tl.load(words, mask=live[:, None], other=0)
    return both.to(tl.int16).to(S.dtype, bitcast=True), (both >> 16).to(tl.int16).to(S.dtype, bitcast=True)


@triton.jit
def load_weights(packed, scales, place, start, S: tl.constexpr):
    """Weights [S.outputs, S.depth] in S.dtype; those of int8 with a scale per row unscaled: `finish` applies it."""
    matrix, outputs, inside = place
    columns = start + tl.arange(0, S.depth // S.parts)
    offsets = outputs.to(tl.int64)[:, None] * S.num_columns + columns[None, :]
    mask = inside[:, None] & (columns < S.num_columns)[None, :]
    weights = tl.load(start_of(packed.codes, matrix) + offsets, mask=mask, other=0)
    if S.codes == "int8":
        weights = decode_int8(weights, S)
    if S.group:
        weights = multiply_add(weights, scales[0][:, None], tl.full((1, 1), -0.0, S.dtype), S)
    return weights.to(S.dtype)


@triton.jit
def load_pairs(packed, table, scales, place, start, S: tl.constexpr, PART: tl.constexpr):
    """Weights of even and of odd columns, [S.outputs, S.depth / 2] each, in S.dtype (formats.format.WeightFormat)."""
    matrix, outputs, inside = place
    if S.codes == "int3":
        first, second = decode_threes(scales[1], scales[2], table, PART, S)
    else:
        WIDTH: tl.constexpr = S.num_columns // 2
        columns = start // 2 + tl.arange(0, S.depth // S.parts // 2)
        offsets = outputs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        pairs = tl.load(start_of(packed.codes, matrix) + offsets, mask=inside[:, None], other=0)
        first, second = decode_pairs(pairs, table, S)
    added = tl.full((1, 1), -0.0, S.dtype)
    if S.codes == "int4":
        origin = tl.full((1, 1), -136.0, S.dtype)
        if S.paired:
            added = scales[1][:, None]
        elif packed.zeros is not None:
            if S.block:
                origin = tl.full((1, 1), -128.0, S.dtype)
                added = scales[1][:, None]
            else:
                origin = scales[1][:, None]
        one = tl.full((1, 1), 1.0, S.dtype)
        first, second = multiply_add(first, one, origin, S), multiply_add(second, one, origin, S)
    factor = scales[0][:, None]
    return multiply_add(first, factor, added, S), multiply_add(second, factor, added, S)


@triton.jit
def load_scales(packed, table, place, start, S: tl.constexpr):
    """The scales and zeros of S.parts groups from column `start` on: for each [S.outputs] in S.dtype.

    Zero points are less 128, since codes are more by that; without zeros, the second are the scales again. Of int3, the
    second and third are bytes of codes [S.outputs, 16], which groups share; of vq2 the third and fourth, and the second
    is what numbers lack (decode_points), scaled.
    """
    matrix, outputs, inside = place
    scales = ((start,),)
    if S.group:
        factors = load_groups(packed.scales, place, start, S)
        zeros = factors
        if S.paired:
            both = factors
            # A byte is the end of the mantissa of a number from 2^23 on: to convert it takes four times as long.
            factors = ((both & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
            zeros = ((both >> 8) | 0x4B000000).to(tl.float32, bitcast=True)
            zeros = factors * tl.fma(zeros, -0.0625, 524296.0)
        elif S.codes == "int4" and packed.zeros is not None:
            zeros = load_groups(packed.zeros, place, start, S)
            if S.block:
                common = start_of(packed.factors, matrix)
                common += (outputs.to(tl.int64) * (S.num_columns // S.block) + start // S.block) * 2
                factors *= tl.load(common, mask=inside, other=0).to(tl.float32)[:, None]
                zeros *= -tl.load(common + 1, mask=inside, other=0).to(tl.float32)[:, None]
            else:
                zeros = -128.0 - zeros
        elif S.codes == "vq2":
            zeros = factors * (0.5 if S.dtype == tl.bfloat16 else 0.0)
        scales = parts_of(factors.to(S.dtype), zeros.to(S.dtype), S)
        if S.codes == "int3":
            scales = with_codes(scales, packed, place, start, S)
        elif S.codes == "vq2":
            scales = with_points(scales, packed, table, place, start, S)
    return scales


@triton.jit
def with_codes(scales, packed, place, start, S: tl.constexpr):
    """The scales of S.depth columns, whose codes lie together (formats/int3.py), each with the bytes of its group."""
    matrix, outputs, inside = place
    LOW: tl.constexpr = S.depth // 4
    HIGH: tl.constexpr = S.depth // 8
    pairs, mask = tl.arange(0, 16), inside[:, None]
    begin = outputs.to(tl.int64)[:, None] * (S.num_columns // 32 * 12) + start // S.depth * (LOW + HIGH)
    codes = start_of(packed.codes, matrix) + begin
    low_bytes = pairs if S.parts > 1 else pairs % LOW
    high_bytes = pairs if S.parts == 4 else pairs % HIGH
    low = tl.load(codes + low_bytes[None, :], mask=mask, other=0)
    high = tl.load(codes + (high_bytes + LOW)[None, :], mask=mask, other=0)
    if S.parts == 4:
        others = tl.load(codes + (pairs + 16)[None, :], mask=mask, other=0)
        first, second = (scales[0][0], low, high), (scales[1][0], low, high)
        found = (first, second, (scales[2][0], others, high), (scales[3][0], others, high))
    else:
        high = spread(high, pairs // HIGH, S.parts)
        if S.parts == 2:
            found = ((scales[0][0], low, high), (scales[1][0], low, high))
        else:
            found = ((scales[0][0], spread(low, pairs // LOW, 2), high),)
    return found


@triton.jit
def with_points(scales, packed, table, place, start, S: tl.constexpr):
    """The scales of S.depth columns, whose codes lie together (formats/vq2.py), each with the bytes of its group and
    those that groups share."""
    matrix, outputs, inside = place
    HIGH: tl.constexpr = 4 * S.parts
    pairs, mask = tl.arange(0, 16), inside[:, None]
    begin = outputs.to(tl.int64)[:, None] * (S.num_columns // 64 * 20) + start // S.depth * (5 * HIGH)
    codes = start_of(packed.codes, matrix) + begin
    points = tl.load(codes + pairs[None, :], mask=mask, other=0)
    signs = tl.load(codes + (4 * HIGH + pairs % HIGH)[None, :], mask=mask, other=0)
    signs = raise_bits(signs, table, 4, S)
    if S.parts == 2:
        more = tl.load(codes + (pairs + 16)[None, :], mask=mask, other=0)
        found = ((scales[0][0], scales[0][1], points, signs), (scales[1][0], scales[1][1], more, signs))
    else:
        found = ((scales[0][0], scales[0][1], points, raise_bits(signs, table, 2, S)),)
    return found


@triton.jit
def spread(codes, places, WIDTH: tl.constexpr):
    """Of bytes [S.outputs, 16] that several pairs of columns share, the 2 * WIDTH bits at a pair's place: the first
    half from the lowest bit on, the second from the fifth on."""
    bits = codes >> (places * (2 * WIDTH)).to(tl.uint8)[None, :]
    MASK: tl.constexpr = 2**WIDTH - 1
    return (bits & MASK) | (((bits >> WIDTH) & MASK) << 4)


@triton.jit
def parts_of(scales, zeros, S: tl.constexpr):
    """Columns of both, [S.outputs, S.parts] each, in pairs."""
    if S.parts == 4:
        scales, zeros = tl.reshape(scales, (S.outputs, 2, 2)), tl.reshape(zeros, (S.outputs, 2, 2))
        even, odd = tl.split(scales)
        even_zeros, odd_zeros = tl.split(zeros)
        scale0, scale2 = tl.split(even)
        scale1, scale3 = tl.split(odd)
        zero0, zero2 = tl.split(even_zeros)
        zero1, zero3 = tl.split(odd_zeros)
        found = ((scale0, zero0), (scale1, zero1), (scale2, zero2), (scale3, zero3))
    elif S.parts == 2:
        scale0, scale1 = tl.split(scales)
        zero0, zero1 = tl.split(zeros)
        found = ((scale0, zero0), (scale1, zero1))
    else:
        found = ((tl.reshape(scales, (S.outputs,)), tl.reshape(zeros, (S.outputs,))),)
    return found


@triton.jit
def load_groups(plane, place, start, S: tl.constexpr):
    """The numbers of a plane [N, K/group] for the groups from column `start` on: [S.outputs, S.parts], float32;
    of e2m1 in S.dtype, and of pairs of bytes both as one integer."""
    matrix, outputs, inside = place
    groups = outputs.to(tl.int64)[:, None] * (S.num_columns // S.group) + (start // S.group + tl.arange(0, S.parts))
    numbers_of = start_of(plane, matrix)
    if S.paired:
        numbers_of = numbers_of.to(tl.pointer_type(tl.uint16), bitcast=True)
    numbers = tl.load(numbers_of + groups, mask=inside[:, None], other=0)
    if S.paired:
        numbers = numbers.to(tl.int32)
    elif S.codes == "e2m1":
        # e8m0: the exponent of a bfloat16, or of a float32; 2^-127 is subnormal.
        if S.dtype == tl.bfloat16:
            numbers = tl.maximum(numbers.to(tl.int16) << 7, 1 << 6).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            exponents = numbers.to(tl.int32)
            numbers = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
    else:
        numbers = numbers.to(tl.float32)
    return numbers


@triton.jit
def finish(sums, packed, matrix, outputs, inside, S: tl.constexpr):
    """Applies the scales or factors of rows and adds biases."""
    if S.paired or (S.codes == "int8" and not S.group):
        scales = start_of(packed.factors if S.paired else packed.scales, matrix)
        sums *= tl.load(scales + outputs, mask=inside, other=0.0)[None, :]
    if packed.biases is not None:
        biases = start_of(packed.biases, matrix)
        sums += tl.load(biases + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    return sums


class RowTiles(NamedTuple):
    """Which rows of the output belong to which matrix.

    `tiles` is int32 [n, 3] of (matrix, first row, last row + 1), each of at most `height` rows; None: all rows belong
    to one matrix.
    """

    tiles: torch.Tensor | None
    height: int


class GroupedProduct:
    """Launches the kernel on one device, where it keeps the tables that codes are looked up in.

    `deterministic` makes the bits of a row depend on that row alone.
    """

    def __init__(self, device: torch.device | str, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self.device = torch.device(device)
        self._capability = capability_of()
        elsewhere = self.device.type == "cpu" or interpreted()
        self.processors = 1 if elsewhere else torch.cuda.get_device_properties(self.device).multi_processor_count
        self._zero: torch.Tensor | None = None
        self._tables: dict[tuple[str, torch.dtype], torch.Tensor | None] = {}

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
        """Tiles, and their height."""
        height = self.height(sum(span.stop - span.start for span in spans) / len(spans), x.dtype)
        tiles = [
            (matrix, first, min(first + height, span.stop))
            for matrix, span in enumerate(spans)
            for first in range(span.start, span.stop, height)
        ]
        return tiles, height

    def height(self, mean_rows: float, dtype: torch.dtype) -> int:
        """The rows of a tile where matrices have so many each; the same for all where bits must not depend on them."""
        return tile_rows(1 if self.deterministic else mean_rows, wide=dtype == torch.float32)

    def takes(self, *layouts: Layout) -> bool:
        """Whether the kernel supports such matrices: of one layout, row after row, with N a multiple of 8.

        The last is needed because adjacent biases must begin at multiples of STEP_NBYTES.
        """
        known = layouts[0].order == ROWS and layouts[0].shape[0] % 8 == 0
        return known and all(layout == layouts[0] for layout in layouts)

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
        processors = self.processors if rows.tiles is None else 0
        cut = tiles_for(rows.height, layout, x.dtype == torch.float32, self._capability, processors)
        grouping = layout.codes, layout.group if layout.grouped else 0, layout.block, layout.paired
        sizes = Sizes(*grouping, *layout.shape, gate, cut.rows, cut.outputs, cut.depth, dot_type(x.dtype))
        num_rows = out.shape[0]
        tiles = triton.cdiv(num_rows, rows.height) if rows.tiles is None else len(rows.tiles)
        grid = (tiles, triton.cdiv(out.shape[1], cut.outputs))
        table = self._table(layout.codes, x.dtype)
        arguments = (x.contiguous(), token_ids, out, packed, table, rows.tiles, num_rows, sizes)
        return Launch(grouped_product, grid, arguments, cut.warps, cut.stages)

    def multiply(self, x: torch.Tensor, matrix: PackedTensor, out: torch.Tensor) -> Launch:
        """out [T, N] = x [T, K] times one matrix [N, K] transposed; needs nothing from the host."""
        return self._alone(x, matrix, out, tile_rows(len(x), wide=x.dtype == torch.float32))

    def warm_up_launches(self, layout: Layout, dtype: torch.dtype) -> Iterator[Launch]:
        """Launches that compile what `multiply` needs for such a matrix and any number of rows, and compute nothing."""
        planes = tuple(torch.empty(16, dtype=torch_dtype(each.dtype), device=self.device) for each in layout.planes)
        x, out = (torch.empty(1, size, dtype=dtype, device=self.device) for size in reversed(layout.shape))
        for height in TILE_ROWS:
            launch = self._alone(x, PackedTensor(layout, planes), out, height)
            yield launch._replace(arguments=(*launch.arguments[:-2], 0, launch.arguments[-1]))

    def _alone(self, x: torch.Tensor, matrix: PackedTensor, out: torch.Tensor, height: int) -> Launch:
        if self._zero is None:
            self._zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        packed = ProductOperands([matrix], []).packed([Stack(plane, self._zero) for plane in matrix.planes])
        return self.launch(x, out, [matrix], [None], RowTiles(None, height), packed=packed)

    def _table(self, codes: str, dtype: torch.dtype) -> torch.Tensor | None:
        if (codes, dtype) not in self._tables:
            self._tables[codes, dtype] = decode.table(codes, dtype, self.device)
        return self._tables[codes, dtype]
