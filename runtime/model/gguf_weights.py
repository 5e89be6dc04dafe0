"""Reads weights of GGUF files: their floats, or the codes and scales of their blocks.

Blocks that no weight format has are dequantized a few rows at a time, by the library of CPU kernels or by gguf.quants.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...offload.checkpoint.checkpoint import Checkpoint
from ...quant.native.blocks import dequantize_blocks
from ...quant.planes import pack_nibbles
from ..shape.gguf_tensors import FLOATS, GgufWeight
from .codes import BIAS, E2M1, Codes

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP = 32
# Of Q4_K: the weights of a block, and the bytes of its factors, its packed scales and zeros.
_BLOCK, _FACTORS, _SCALES = 256, 4, 12


def gguf_floats(checkpoint: Checkpoint, weight: GgufWeight, experts: range | None = None) -> Tensor:
    """A weight that the file holds in floats, in their dtype; of stacked experts [E, ...] those in `experts` alone."""
    chosen = range(weight.expert, weight.expert + 1) if weight.expert is not None else experts
    parts = [_read(checkpoint, name, chosen) for name in weight.sources]
    # Rows of matrices by turns, and elements of biases.
    dim = -2 if weight.turned else -1
    joined = parts[0] if len(parts) == 1 else torch.stack(parts, dim).flatten(dim - 1, dim)
    joined = _in_order(joined if weight.expert is None else joined[0], weight.heads)
    joined = joined.transpose(-1, -2) if weight.turned else joined
    joined = joined + weight.added if weight.added else joined
    return joined.reshape(weight.entry.shape if experts is None else (len(experts), *weight.entry.shape[1:]))


def gguf_codes(checkpoint: Checkpoint, weight: GgufWeight, expert: int | None = None) -> Codes:
    """The codes of a matrix, or of one expert's of a stack, of a type whose codes a weight format has."""
    rows, columns = weight.entry.shape[:-3:-1] if weight.turned else weight.entry.shape[-2:]
    return _CODES[weight.numbers](_by_turns(_matrices(checkpoint, weight, expert)), (rows, columns))


def gguf_rows(checkpoint: Checkpoint, weight: GgufWeight, expert: int | None = None) -> Callable[[int, int], Tensor]:
    """Gives rows `begin` to `end` of a matrix, or of one expert's of a stack, in float32."""
    return _widened(_matrices(checkpoint, weight, expert), [checkpoint.entries[name].dtype for name in weight.sources])


def q4_k_rows(checkpoint: Checkpoint, weight: GgufWeight, expert: int | None = None) -> Tensor:
    """The rows of Q4_K in the planes of the format q4_k, uint8 [N, bytes]: codes, scales, zeros and factors.

    A block of 256 has two factors, eight scales and eight zeros of six bits each (llama.cpp, get_scale_min_k4), and
    codes in four runs of 64, the first half of each in the low bits.
    """
    raw = _by_turns(_matrices(checkpoint, weight, expert))
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
    for name in weight.sources:
        shape = checkpoint.entries[name].shape
        data = _bytes(checkpoint, name, None if chosen is None else range(chosen, chosen + 1))
        found.append(_in_order(data.view(shape[-2] if len(shape) > 1 else 1, -1), weight.heads))
    return found


def _read(checkpoint: Checkpoint, name: str, experts: range | None) -> Tensor:
    entry = checkpoint.entries[name]
    shape = entry.shape if experts is None else (len(experts), *entry.shape[1:])
    return _bytes(checkpoint, name, experts).view(_DTYPES[entry.dtype]).view(shape)


def _bytes(checkpoint: Checkpoint, name: str, experts: range | None) -> Tensor:
    entry = checkpoint.entries[name]
    each = entry.nbytes if experts is None else entry.nbytes // entry.shape[0]
    data = torch.empty(each if experts is None else each * len(experts), dtype=torch.uint8)
    checkpoint.read_into(name, data.numpy().data, 0 if experts is None else each * experts.start)
    return data


def _in_order(rows: Tensor, heads: int) -> Tensor:
    """Rows of heads as transformers has them: llama.cpp has the two halves of a head by turns."""
    if not heads:
        return rows
    return rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _by_turns(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts, 1).flatten(0, 1)


def _widened(parts: list[Tensor], kinds: list[str]) -> Callable[[int, int], Tensor]:
    count = len(parts)

    def rows(begin: int, end: int) -> Tensor:
        # Chunks of rows are even, and so are the rows of matrices that are made of two.
        return _by_turns(
            [_dequantized(part[begin // count : end // count], kind) for part, kind in zip(parts, kinds, strict=True)]
        )

    return rows


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
    return Codes(shape, _nibbles(blocks[..., 2:], shape[1]), (1, _GROUP), _halves(blocks), 8)


def _mxfp4(raw: Tensor, shape: tuple[int, int]) -> Codes:
    blocks = raw.view(shape[0], -1, 1 + _GROUP // 2)
    scale = torch.exp2(blocks[..., 0].float() - BIAS)
    return Codes(shape, _nibbles(blocks[..., 1:], shape[1]), (1, _GROUP), scale, 0, torch.tensor(E2M1))


def _halves(blocks: Tensor) -> Tensor:
    """The scales at the beginning of blocks, [rows, blocks]."""
    return blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(packed: Tensor, num_columns: int) -> Callable[[int, int], Tensor]:
    """Codes of blocks whose low bits hold the first half."""

    def rows(begin: int, end: int) -> Tensor:
        part = packed[begin:end]
        return torch.cat((part & 15, part >> 4), -1).reshape(-1, num_columns)

    return rows


_CODES: dict[str, Callable[[Tensor, tuple[int, int]], Codes]] = {"MXFP4": _mxfp4, "Q4_0": _q4_0, "Q8_0": _q8_0}
