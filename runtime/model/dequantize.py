"""Reads a weight of a quantized checkpoint or of a GGUF file: floats, or its codes, scales and zero points as they are.

weight = (code - zero) * scale, computed in float32 and rounded once to the dtype that is wanted. A few rows are
computed at a time, so memory peaks at the bytes of one matrix in the files beside the result. Blocks of GGUF that no
weight format has are dequantized by the library of CPU kernels or by gguf.quants.

Of kept codes a row of all planes is one run of bytes, so that transformers' conversions, which stack, join and rename
rows, treat kept weights as they treat floats: a weight is uint8 [N, bytes of a row].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.checkpoint.header import described
from ...offload.errors import BadCheckpoint
from ...quant.formats.format import ROWS, Layout, Plane, get_format
from ...quant.matmul.thread_pool import torch_threads
from ...quant.native.calls import dequantize_blocks, look_up
from ...quant.tensor import SAFETENSORS_DTYPES, Planes, dtype_name, pack_nibbles, torch_dtype
from ..shape.gguf_names import Order
from ..shape.gguf_tensors import FLOATS, GgufWeight
from ..shape.quantization import WHOLE
from ..shape.quantized import QuantizedWeight

# OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# How far exponents of e8m0 are shifted.
BIAS = 127
# What bytes of e4m3 mean; torch converts them one by one.
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [N, K]: `rows(begin, end)` are its codes [n, K], uint8, int8 or e4m3; `levels` has what those mean.

    `scale` is float32 [N / group rows, K / group columns], or [blocks] of the flattened matrix; `zero` likewise, or the
    same for all. `columns` [K] is the group of each column where groups are not runs of columns.
    """

    shape: tuple[int, int]
    rows: Callable[[int, int], Tensor]
    group: tuple[int, int]
    scale: Tensor
    zero: Tensor | int
    levels: Tensor | None = None
    columns: Tensor | None = None

    def widen(self, begin: int, end: int) -> Tensor:
        """Rows of the matrix in float32."""
        codes, levels = self.rows(begin, end), self.levels
        if codes.dtype == torch.float8_e4m3fn:
            codes, levels = codes.view(torch.uint8), _E4M3
        values = codes.float() if levels is None else look_up(codes, levels)
        # Values [n, K] as [n, groups, columns of a group], where all rows consist of whole runs of columns.
        groups = values.view(len(values), -1, self.group[1]) if self._runs else values
        if isinstance(self.zero, Tensor):
            groups -= self._spread(self.zero, begin, end)
        elif self.zero:
            groups -= self.zero
        groups.mul_(self._spread(self.scale, begin, end))
        return values

    @property
    def _runs(self) -> bool:
        columns = self.group[1]
        return self.scale.dim() > 1 and self.columns is None and columns > 1 and self.shape[1] % columns == 0

    def _spread(self, grid: Tensor, begin: int, end: int) -> Tensor:
        """The number of each weight's group, of a shape that broadcasts to that of groups."""
        num_columns, (rows, columns) = self.shape[1], self.group
        if grid.dim() == 1:
            index = torch.arange(begin * num_columns, end * num_columns) // columns
            return grid[index].view(-1, num_columns)
        if rows != WHOLE:
            grid = grid[begin:end] if rows == 1 else grid[torch.arange(begin, end) // rows]
        if self._runs:
            return grid[:, :, None]
        if self.columns is not None:
            return grid[:, self.columns]
        return grid if columns in (WHOLE, 1) else grid.repeat_interleave(columns, 1)[:, :num_columns]


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP = 32
# Of Q4_K: the weights of a block, and the bytes of its factors, its packed scales and zeros.
_BLOCK, _FACTORS, _SCALES = 256, 4, 12


def gguf_floats(checkpoint: Checkpoint, weight: GgufWeight, experts: range | None = None) -> Tensor:
    """A weight that the file holds in floats, in their dtype; of stacked experts [E, ...] those in `experts` alone."""
    chosen = range(weight.expert, weight.expert + 1) if weight.expert is not None else experts
    parts = [_read_floats(checkpoint, name, chosen) for name in weight.sources]
    dim = -1 if weight.vector else -2
    flat = (_flipped(part) if index in weight.flipped else _unstacked(part, weight) for index, part in enumerate(parts))
    joined = torch.cat(list(flat), dim)
    joined = joined.index_select(dim, _index(weight.rows)) if weight.rows else joined
    joined = joined.index_select(-1, _index(weight.columns)) if weight.columns else joined
    joined = joined.transpose(-1, -2) if weight.turned else joined
    joined = joined.neg().log() if weight.logarithm else joined
    joined = joined + weight.added if weight.added else joined
    return joined.reshape(weight.entry.shape if experts is None else (len(experts), *weight.entry.shape[1:]))


def gguf_codes(checkpoint: Checkpoint, weight: GgufWeight, expert: int | None = None) -> Codes:
    """The codes of a matrix, or of one expert's of a stack, of a type whose codes a weight format has."""
    rows, columns = weight.entry.shape[:-3:-1] if weight.turned else weight.entry.shape[-2:]
    return _CODES[weight.numbers](_in_order(_matrices(checkpoint, weight, expert), weight), (rows, columns))


def gguf_rows(checkpoint: Checkpoint, weight: GgufWeight, expert: int | None = None) -> Callable[[int, int], Tensor]:
    """Gives rows `begin` to `end` of a matrix, or of one expert's of a stack, in float32."""
    parts = _matrices(checkpoint, weight, expert)
    types = [checkpoint.entries[name].dtype for name in weight.sources]
    kinds = ["F32" if index in weight.flipped else kind for index, kind in enumerate(types)]
    ends = list(accumulate(len(part) for part in parts))
    if len(parts) == 1 and not weight.rows and not weight.columns:
        return lambda begin, end: _dequantized(parts[0][begin:end], kinds[0])
    order = _index(weight.rows) if weight.rows else torch.arange(ends[-1])
    columns = _index(weight.columns) if weight.columns else None

    def rows(begin: int, end: int) -> Tensor:
        chosen = order[begin:end]
        out = torch.empty(len(chosen), weight.entry.shape[-2 if weight.turned else -1])
        for part, kind, last in zip(parts, kinds, ends, strict=True):
            own = (chosen >= last - len(part)) & (chosen < last)
            if own.any():
                floats = _dequantized(part[chosen[own] - (last - len(part))], kind)
                out[own] = floats if columns is None else floats[:, columns]
        return out

    return rows


def q4_k_rows(checkpoint: Checkpoint, weight: GgufWeight, expert: int | None = None) -> Tensor:
    """The rows of Q4_K in the planes of the format q4_k, uint8 [N, bytes]: codes, scales, zeros and factors.

    A block of 256 has two factors, eight scales and eight zeros of six bits each (llama.cpp, get_scale_min_k4), and
    codes in four runs of 64, the first half of each in the low bits.
    """
    raw = _in_order(_matrices(checkpoint, weight, expert), weight)
    num_rows = len(raw)
    blocks = raw.view(num_rows, -1, _FACTORS + _SCALES + _BLOCK // 2)
    factors, codes = blocks[..., :_FACTORS], blocks[..., _FACTORS + _SCALES :]
    low, middle, high = (blocks[..., begin : begin + 4] for begin in range(_FACTORS, _FACTORS + _SCALES, 4))
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1)
    zeros = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), -1)
    runs = codes.view(num_rows, -1, 4, _GROUP)
    numbers = torch.stack((runs & 15, runs >> 4), -2).reshape(num_rows, -1)
    planes = (pack_nibbles(numbers, high_first=False), scales, zeros, factors)
    return torch.cat([plane.reshape(num_rows, -1) for plane in planes], 1)


def _matrices(checkpoint: Checkpoint, weight: GgufWeight, expert: int | None) -> list[Tensor]:
    """The bytes of the rows of a matrix, uint8 [rows, bytes], of each source."""
    chosen = weight.expert if weight.expert is not None else expert
    found = []
    for index, name in enumerate(weight.sources):
        entry = checkpoint.entries[name]
        data = _read_bytes(checkpoint, name, None if chosen is None else range(chosen, chosen + 1))
        if index in weight.flipped:
            floats = _dequantized(data.view(prod(entry.shape[:-1]), -1), entry.dtype).view(entry.shape)
            found.append(_flipped(floats).contiguous().view(torch.uint8))
        else:
            count = prod(entry.shape[:-1] if weight.flipped else entry.shape[-2:-1])
            found.append(data.view(count, -1))
    return found


def _flipped(heads: Tensor) -> Tensor:
    """Matrices of heads, each the other way round, below one another."""
    return heads.transpose(1, 2).flatten(0, 1)


def _unstacked(part: Tensor, weight: GgufWeight) -> Tensor:
    return part.flatten(0, 1) if weight.flipped or weight.expert is not None else part


def _read_floats(checkpoint: Checkpoint, name: str, experts: range | None) -> Tensor:
    entry = checkpoint.entries[name]
    shape = entry.shape if experts is None else (len(experts), *entry.shape[1:])
    return _read_bytes(checkpoint, name, experts).view(_DTYPES[entry.dtype]).view(shape)


def _read_bytes(checkpoint: Checkpoint, name: str, experts: range | None) -> Tensor:
    entry = checkpoint.entries[name]
    each = entry.nbytes if experts is None else entry.nbytes // entry.shape[0]
    data = torch.empty(each if experts is None else each * len(experts), dtype=torch.uint8)
    checkpoint.read_into(name, data.numpy().data, 0 if experts is None else each * experts.start)
    return data


def _in_order(parts: list[Tensor], weight: GgufWeight) -> Tensor:
    """Rows of sources below one another, in the order that transformers has."""
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined[_index(weight.rows)] if weight.rows else joined


def _index(order: Order) -> Tensor:
    """The index of each row of an order."""
    runs = []
    for begin, loops in order:
        found = torch.tensor(begin)
        for count, step in loops:
            found = found[..., None] + step * torch.arange(count)
        runs.append(found.flatten())
    return torch.cat(runs)


def _dequantized(rows: Tensor, kind: str) -> Tensor:
    if kind in FLOATS:
        return rows.contiguous().view(_DTYPES[kind]).float()
    # An extra: other checkpoints do not need it.
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    weights, nbytes = gguf.GGML_QUANT_SIZES[number]
    floats = dequantize_blocks(rows.contiguous().view(-1, nbytes), kind, weights)
    if floats is None:
        floats = torch.from_numpy(gguf.quants.dequantize(rows.contiguous().numpy(), number))
    return floats.view(len(rows), -1)


def _q8_0(raw: Tensor, shape: tuple[int, int]) -> Codes:
    blocks = raw.view(shape[0], -1, 2 + _GROUP)
    codes = blocks[..., 2:].reshape(shape).view(torch.int8)
    return Codes(shape, lambda begin, end: codes[begin:end], (1, _GROUP), _halves(blocks), 0)


def _q4_0(raw: Tensor, shape: tuple[int, int]) -> Codes:
    blocks = raw.view(shape[0], -1, 2 + _GROUP // 2)
    return Codes(shape, _halved_blocks(blocks[..., 2:], shape[1]), (1, _GROUP), _halves(blocks), 8)


def _mxfp4(raw: Tensor, shape: tuple[int, int]) -> Codes:
    blocks = raw.view(shape[0], -1, 1 + _GROUP // 2)
    scale = torch.exp2(blocks[..., 0].float() - BIAS)
    return Codes(shape, _halved_blocks(blocks[..., 1:], shape[1]), (1, _GROUP), scale, 0, torch.tensor(E2M1))


def _halves(blocks: Tensor) -> Tensor:
    """The scales at the beginning of blocks, [rows, blocks]."""
    return blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()


def _halved_blocks(packed: Tensor, num_columns: int) -> Callable[[int, int], Tensor]:
    """Codes of blocks whose low bits hold the first half."""

    return lambda begin, end: torch.cat((packed[begin:end] & 15, packed[begin:end] >> 4), -1).reshape(-1, num_columns)


_CODES: dict[str, Callable[[Tensor, tuple[int, int]], Codes]] = {"MXFP4": _mxfp4, "Q4_0": _q4_0, "Q8_0": _q8_0}


# Weights that are in float32 at a time, and the most bytes of their codes, values, scales and indices.
_CHUNK = 1 << 18
WIDENING_NBYTES = 32 * _CHUNK
# The outputs that eight codes of a word belong to in AutoAWQ's GEMM layout, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_VIEWS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8}
# The parts that stacked experts have one each of, and those that are read as headers are.
_STACKED = ("codes", "scale")
_READ_BEFORE = ("state", "shape")


def dequantize(
    checkpoint: Checkpoint, weight: QuantizedWeight, dtype: torch.dtype, experts: range | None = None
) -> Tensor:
    """The weight in `dtype`, as a model has it; of stacked experts [E, ...] those in `experts` alone.

    Raises BadCheckpoint where bytes are not those of the format.
    """
    if isinstance(weight, GgufWeight) and not weight.bits:
        return gguf_floats(checkpoint, weight, experts)
    shape = weight.entry.shape
    if len(shape) == 2:
        return _fill(_rows(checkpoint, weight, None), torch.empty(shape, dtype=dtype))
    chosen = experts or range(shape[0])
    out = torch.empty(len(chosen), *shape[1:], dtype=dtype)
    for matrix, expert in zip(out, chosen, strict=True):
        _fill(_rows(checkpoint, weight, expert), matrix.t() if weight.turned else matrix)
    return out


def _rows(checkpoint: Checkpoint, weight: QuantizedWeight, expert: int | None) -> Callable[[int, int], Tensor]:
    """Gives rows `begin` to `end` of a matrix in float32."""
    if isinstance(weight, GgufWeight):
        return gguf_rows(checkpoint, weight, expert)
    return read_codes(checkpoint, weight, expert).widen


def _fill(rows: Callable[[int, int], Tensor], out: Tensor) -> Tensor:
    # Words of AWQ hold eight rows.
    step = max(8, _CHUNK // out.shape[1] // 8 * 8)
    # Chunks are too small to share: with other work on the machine every operation would wait for the slower thread.
    with torch_threads(1):
        for begin in range(0, len(out), step):
            out[begin : begin + step] = rows(begin, min(begin + step, len(out)))
    return out


def read_codes(checkpoint: Checkpoint, weight: QuantizedWeight, expert: int | None = None) -> Codes:
    """The codes of a matrix, or of one expert's of a stack. Raises BadCheckpoint."""
    if isinstance(weight, GgufWeight):
        return gguf_codes(checkpoint, weight, expert)
    parts = {
        role: _read(checkpoint, name, expert if role in _STACKED else None)
        for role, name in weight.tensors.items()
        if role not in _READ_BEFORE
    }
    rows, columns = weight.entry.shape[:-3:-1] if weight.turned else weight.entry.shape[-2:]
    scale = _scales(parts, weight, (rows, columns))
    order = parts.get("order")
    if order is not None:
        if not 0 <= int(order.min()) <= int(order.max()) < scale.shape[1]:
            raise BadCheckpoint(
                f"{described(weight.tensors['order'])} has {int(order.min())} to {int(order.max())}, wanted groups "
                f"from 0 to {scale.shape[1] - 1}"
            )
        if torch.equal(order.long(), torch.arange(columns) // (weight.group[1] or columns)):
            # Runs of columns, as most files say that have an order at all.
            order = None
    return Codes(
        (rows, columns),
        _PACKINGS[weight.packing](parts["codes"], weight.bits, columns),
        weight.group,
        scale,
        _zeros(parts, weight, rows),
        torch.tensor(E2M1) if weight.numbers == "e2m1" else parts.get("table"),
        None if order is None else order.long(),
    )


def _read(checkpoint: Checkpoint, name: str, expert: int | None) -> Tensor:
    entry = checkpoint.entries[name]
    shape = entry.shape if expert is None else entry.shape[1:]
    data = _read_bytes(checkpoint, name, None if expert is None else range(expert, expert + 1))
    return data.view(_VIEWS.get(entry.dtype) or SAFETENSORS_DTYPES[entry.dtype]).view(shape)


def _scales(parts: Mapping[str, Tensor], weight: QuantizedWeight, shape: tuple[int, int]) -> Tensor:
    """The scales as float32 [rows of groups, columns of groups], or by blocks of the flattened matrix."""
    scale = parts["scale"]
    if weight.packing == "high-nibbles":
        return _absmax(parts, weight, shape)
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - BIAS)
    scale = scale.float()
    if "divisor" in parts:
        divisor = parts["divisor"].float()
        if not (divisor.isfinite() & (divisor > 0)).all():
            raise BadCheckpoint(
                f"{described(weight.tensors['divisor'])} is {float(divisor):g}, wanted a positive number"
            )
        scale = scale / divisor
    if weight.numbers == "bnb-int":
        scale = scale / 127
    if weight.packing in ("words-first", "awq"):
        return scale.t().contiguous()
    rows, columns = (
        1 if group == WHOLE else -(-size // group) for size, group in zip(shape, weight.group, strict=True)
    )
    return scale.reshape(rows, columns)


def _absmax(parts: Mapping[str, Tensor], weight: QuantizedWeight, shape: tuple[int, int]) -> Tensor:
    """bitsandbytes' scales of blocks, which may be quantized themselves."""
    absmax = parts["scale"]
    if weight.nested is not None:
        block, offset = weight.nested
        outer = parts["nested_scale"].repeat_interleave(block)[: len(absmax)]
        absmax = parts["nested_table"][absmax.int()] * outer + offset
    return absmax.view(shape[0], -1) if shape[1] % weight.group[1] == 0 else absmax


def _zeros(parts: Mapping[str, Tensor], weight: QuantizedWeight, num_rows: int) -> Tensor | int:
    """Zero points as float32, like the scales; an integer where all are the same."""
    zero = parts.get("zero")
    if zero is None:
        return weight.zero
    if weight.packing == "bytes":
        return zero.float().view(len(zero), -1)
    words = zero.t() if weight.packing == "words" else zero
    if weight.zero and 32 % weight.bits == 0:
        # GPTQ's first layout has every zero point less one, taken from whole words: a zero point of 0 borrows from its
        # neighbour, and gets that back here (GPTQModel, convert_gptq_v1_to_v2_format_module).
        words = words + weight.zero * _ones(weight.bits, words.shape[1])
    codes = _unpacked(words, weight.bits, num_rows)
    codes = _in_awq_order(codes) if weight.packing == "awq" else codes
    if weight.zero and 32 % weight.bits:
        # Codes of three bits cross words, and a word's carry would be lost.
        codes = (codes + weight.zero) % (1 << weight.bits)
    return codes.t().float()


def _ones(bits: int, num_words: int) -> Tensor:
    """int32 words whose codes are all 1."""
    stream = np.zeros(32 * num_words, dtype=np.uint8)
    stream[::bits] = 1
    return torch.from_numpy(np.packbits(stream, bitorder="little").view(np.int32))


_Rows = Callable[[int, int], Tensor]


def _low_nibbles(codes: Tensor, bits: int, num_columns: int) -> _Rows:
    rows = codes.reshape(-1, num_columns // 2)
    return lambda begin, end: _each_nibble(rows[begin:end].view(torch.uint8))


def _high_nibbles(codes: Tensor, bits: int, num_columns: int) -> _Rows:
    # Rows of an odd length start inside a byte.
    flat = codes.reshape(-1).view(torch.uint8)

    def rows(begin: int, end: int) -> Tensor:
        first, last = begin * num_columns, end * num_columns
        pairs = flat[first // 2 : -(-last // 2)]
        nibbles = torch.stack((pairs >> 4, pairs & 15), -1).view(-1)
        return nibbles[first % 2 :][: last - first].view(-1, num_columns)

    return rows


_PACKINGS: Mapping[str, Callable[[Tensor, int, int], _Rows]] = {
    "awq": lambda codes, bits, num_columns: (
        lambda begin, end: _in_awq_order(_unpacked(codes[:, begin // 8 : end // 8], 4, end - begin)).t()
    ),
    "bytes": lambda codes, bits, num_columns: lambda begin, end: codes[begin:end],
    "high-nibbles": _high_nibbles,
    "low-nibbles": _low_nibbles,
    "words": lambda codes, bits, num_columns: lambda begin, end: _unpacked(codes[begin:end], bits, num_columns),
    "words-first": lambda codes, bits, num_columns: (
        lambda begin, end: _unpacked(codes[:, begin:end].t(), bits, num_columns)
    ),
}


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of int32 words [n, W], which are a stream of bits from the lowest on."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return _each_nibble(data)[:, :count]
    stream = np.unpackbits(data.numpy(), axis=1, bitorder="little")[:, : count * bits]
    codes = np.packbits(stream.reshape(len(stream), count, bits), axis=2, bitorder="little")
    return torch.from_numpy(codes.reshape(len(stream), count))


def _each_nibble(data: Tensor) -> Tensor:
    """The codes [n, 2 * B] of uint8 [n, B], the lower half of each byte first: both at once, as a number of 16 bits."""
    wide = data.to(torch.int16)
    return (wide | wide << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def _in_awq_order(codes: Tensor) -> Tensor:
    outputs = torch.empty_like(codes)
    outputs.view(len(codes), -1, 8)[:, :, _AWQ_ORDER] = codes.reshape(len(codes), -1, 8)
    return outputs


# Exponents of e8m0 are shifted by 127, and frexp's mantissas are below 1.
_EXPONENT = 126


def row_nbytes(layout: Layout) -> int:
    """Bytes of a row in all planes of a layout."""
    return sum(size for _, size in _row_planes(layout))


def read_rows(checkpoint: Checkpoint, weight: QuantizedWeight, experts: range | None = None) -> Tensor:
    """The rows of a weight that `weight.kept` has, uint8 [N, bytes]; [E, N, bytes] of stacked experts.

    Experts that the model has transposed are [E, bytes, N]. Raises BadCheckpoint where the bytes are not what the
    headers let expect.
    """
    if len(weight.entry.shape) == 2:
        return _matrix_rows(checkpoint, weight)
    chosen = experts or range(weight.entry.shape[0])
    rows = torch.stack([_matrix_rows(checkpoint, weight, expert) for expert in chosen])
    return rows.transpose(1, 2) if weight.turned else rows


def _matrix_rows(checkpoint: Checkpoint, weight: QuantizedWeight, expert: int | None = None) -> Tensor:
    if isinstance(weight, GgufWeight) and weight.kept == "q4_k":
        return q4_k_rows(checkpoint, weight, expert)
    return _kept_rows(read_codes(checkpoint, weight, expert), weight)


def planes_of_rows(rows: Tensor, layout: Layout) -> Planes:
    """The planes that rows [N, bytes] are made of."""
    found, begin = [], 0
    for plane, size in _row_planes(layout):
        part = rows[:, begin : begin + size].contiguous().view(torch_dtype(plane.dtype))
        found.append(part.view(plane.shape))
        begin += size
    return Planes(*found)


def _row_planes(layout: Layout) -> Iterator[tuple[Plane, int]]:
    """The planes of a format row after row, and their bytes of one."""
    plain = get_format(layout.format).in_order(ROWS).layout(layout.shape, layout.dtype)
    for plane in plain.planes:
        yield plane, prod(plane.shape[1:]) * torch_dtype(plane.dtype).itemsize


def _kept_rows(codes: Codes, weight: QuantizedWeight) -> Tensor:
    # Codes are kept where groups are runs of columns; headers do not show it.
    if codes.columns is not None:
        raise BadCheckpoint(
            f"{described(weight.tensors['order'])} orders the inputs, and config.json says nothing of desc_act; "
            "correct it there"
        )
    numbers = codes.rows(0, codes.shape[0])
    layout = get_format(weight.kept).in_order(ROWS).layout(codes.shape, "float32")
    planes = [_codes(numbers, layout, weight)]
    for plane in layout.planes[1:]:
        grid = codes.scale if plane.name == "scales" else codes.zero
        grid = grid if isinstance(grid, Tensor) else torch.full(plane.shape, float(grid))
        planes.append(_cast(grid.reshape(plane.shape), plane, get_format(weight.kept).scales))
    # A single column counts as contiguous whatever its strides are.
    return torch.cat(
        [
            plane.reshape(len(numbers), -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
            for plane in planes
        ],
        1,
    )


def _codes(numbers: Tensor, layout: Layout, weight: QuantizedWeight) -> Tensor:
    if layout.codes != "int8":
        return pack_nibbles(numbers, high_first=layout.codes == "nf4")
    return numbers if numbers.dtype == torch.int8 else (numbers.short() - 128).to(torch.int8)


def _cast(grid: Tensor, plane: Plane, scales: str) -> Tensor:
    """A grid of float32 in the dtype that it came from. Raises BadCheckpoint where that cannot hold it."""
    if plane.name == "scales" and scales == "e8m0":
        if not grid.isfinite().all():
            raise BadCheckpoint("a scale of the checkpoint is NaN; download it again")
        return (torch.frexp(grid).exponent + _EXPONENT).to(torch.uint8)
    made = grid.to(torch_dtype(plane.dtype))
    if not torch.equal(made.float(), grid) and not grid.isnan().any():
        raise BadCheckpoint(f"{plane.name} of the checkpoint are not {dtype_name(made.dtype)}; download it again")
    return made
