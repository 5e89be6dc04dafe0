"""Reads a weight of a quantized checkpoint: its codes, scales and zero points, and the floats that they mean.

weight = (code - zero) * scale, computed in float32 and rounded once to the dtype that is wanted. A few rows are
computed at a time, so memory peaks at the bytes of one matrix in the files beside the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.checkpoint.json_object import described
from ...offload.errors import BadCheckpoint
from ...quant.matmul.thread_pool import torch_threads
from ...quant.tensor import SAFETENSORS_DTYPES
from ..shape.gguf_tensors import GgufWeight
from ..shape.quantization import WHOLE
from ..shape.quantized import QuantizedWeight
from .codes import BIAS, E2M1, Codes
from .gguf_weights import gguf_codes, gguf_floats, gguf_rows

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
        if torch.equal(order, torch.arange(columns) // (weight.group[1] or columns)):
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
    nbytes = entry.nbytes if expert is None else entry.nbytes // entry.shape[0]
    data = torch.empty(nbytes, dtype=torch.uint8)
    checkpoint.read_into(name, data.numpy().data, nbytes * (expert or 0))
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
    codes = _in_awq_order(_unpacked(words, 4, num_rows)) if weight.packing == "awq" else None
    codes = _unpacked(words, weight.bits, num_rows) if codes is None else codes
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


def _bytes(codes: Tensor, bits: int, num_columns: int) -> _Rows:
    return lambda begin, end: codes[begin:end]


def _words(codes: Tensor, bits: int, num_columns: int) -> _Rows:
    return lambda begin, end: _unpacked(codes[begin:end], bits, num_columns)


def _words_first(codes: Tensor, bits: int, num_columns: int) -> _Rows:
    return lambda begin, end: _unpacked(codes[:, begin:end].t(), bits, num_columns)


def _awq(codes: Tensor, bits: int, num_columns: int) -> _Rows:
    def rows(begin: int, end: int) -> Tensor:
        return _in_awq_order(_unpacked(codes[:, begin // 8 : end // 8], 4, end - begin)).t()

    return rows


def _low_nibbles(codes: Tensor, bits: int, num_columns: int) -> _Rows:
    rows = codes.reshape(-1, num_columns // 2)
    return lambda begin, end: _nibbles(rows[begin:end].view(torch.uint8))


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
    "awq": _awq,
    "bytes": _bytes,
    "high-nibbles": _high_nibbles,
    "low-nibbles": _low_nibbles,
    "words": _words,
    "words-first": _words_first,
}


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes of each row of int32 words [n, W], which are a stream of bits from the lowest on."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return _nibbles(data)[:, :count]
    stream = np.unpackbits(data.numpy(), axis=1, bitorder="little")[:, : count * bits]
    codes = np.packbits(stream.reshape(len(stream), count, bits), axis=2, bitorder="little")
    return torch.from_numpy(codes.reshape(len(stream), count))


def _nibbles(data: Tensor) -> Tensor:
    """The codes [n, 2 * B] of uint8 [n, B], the lower half of each byte first: both at once, as a number of 16 bits."""
    wide = data.to(torch.int16)
    return (wide | wide << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def _in_awq_order(codes: Tensor) -> Tensor:
    outputs = torch.empty_like(codes)
    outputs.view(len(codes), -1, 8)[:, :, _AWQ_ORDER] = codes.reshape(len(codes), -1, 8)
    return outputs
