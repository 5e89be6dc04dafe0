"""A grouped matmul of activations with packed matrices: a Triton kernel that dequantizes codes in registers."""

import triton
import triton.language as tl

from .activation import activate


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
