"""4-bit NormalFloat (Dettmers et al. 2023, QLoRA) in blocks of weights of a row.

Planes: codes uint8 [N, K/2], the first of two weights in the high bits; absmax [N, K/block], bfloat16 in format `nf4`.
Codes are bit-identical to those of bitsandbytes 0.50: the float32 absmax determines them and is rounded afterwards.

In order `nf4pack` (FusedCodec) they lie as bitsandbytes' fused product reads them: by blocks of 32 rows whose bytes are
ordered as [K/2, 32]. Byte 2 i + p of a pair of columns has column p of row i in the low bits and of row 16 + i in the
high bits. absmax is bfloat16 [K/block, N].
"""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from . import bitsandbytes_kernels, lookup
from .format import row_chunks

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
VALUES = lookup.Values(LEVELS, high_first=True)
# A weight on a midpoint gets the lower level, as in bitsandbytes.
MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(LEVELS))
# The bound by which bitsandbytes avoids dividing a block of zeros by 0; another value would change codes.
SMALLEST_ABSMAX = 1e-38
# The largest absmax, in bfloat16 or wider, with which a block's largest weight does not overflow the matrix's dtype.
LARGEST_ABSMAX = {
    torch.float32: torch.finfo(torch.bfloat16).max,
    torch.bfloat16: torch.finfo(torch.bfloat16).max,
    torch.float16: 65280.0,
}


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Packs `weight` [n, K], finite: each weight gets the level nearest to weight / absmax of its block."""
    codes, absmax = planes
    numbers, wide = _numbers(weight, absmax.numel())
    absmax.view(-1).copy_(wide.clamp(max=LARGEST_ABSMAX[weight.dtype]))
    # Both numbers of a byte at once, the first in the low bits of 16; as two tensors they would be read with a stride.
    pairs = numbers.view(torch.int16)
    torch.bitwise_or(pairs << 4, pairs >> 8, out=pairs)
    codes.view(-1).copy_(pairs)


def _numbers(weight: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """The index of each weight's level, uint8 [n * K], and the absmax of each block, float32."""
    blocks = weight.contiguous().view(num_blocks, -1)
    if weight.dtype == torch.bfloat16:
        # Magnitudes are in the order of their bits, whose maximum takes a third of the time.
        wide = torch.bitwise_and(blocks.view(torch.int16), 0x7FFF).amax(1).view(torch.bfloat16).float()
    else:
        wide = blocks.abs().amax(1).float()
    scaled = blocks.to(torch.float32, copy=True).mul_(wide.clamp(min=SMALLEST_ABSMAX).reciprocal_()[:, None]).view(-1)
    return _nearest_levels(scaled), wide


def _nearest_levels(scaled: Tensor) -> Tensor:
    """Indices into LEVELS for numbers in [-1, 1], float32 [n] with n even: the number of midpoints below each, uint8.

    A table of small cells says it; the few numbers that are in the cell of a midpoint are compared with it.
    """
    cells = scaled.mul(_CELLS / 2).add_(_CELLS / 2).to(torch.int32)
    numbers = torch.index_select(_table(scaled.device), 0, cells)
    # Eight numbers at a time: comparing bytes takes longer than looking them up.
    words = numbers.view(torch.int64) if len(numbers) % 8 == 0 else numbers
    unknown = torch.bitwise_and(words, _UNKNOWN_WORD if len(numbers) % 8 == 0 else _UNKNOWN).nonzero().view(-1)
    if len(unknown):
        exact = scaled.view(len(words), -1)[unknown]
        midpoints = torch.tensor(MIDPOINTS, device=scaled.device)
        numbers.view(len(words), -1)[unknown] = torch.bucketize(exact, midpoints, out_int32=True).to(torch.uint8)
    return numbers


# The cells of the table between -1 and 1, and what it has for those with a midpoint. It fits a core's first cache.
_CELLS = 1 << 15
_UNKNOWN = 16
_UNKNOWN_WORD = 0x1010101010101010
# More than a number moves by the rounding of its position among the cells.
_ROUNDING = 2.0**-20


@cache
def _table(device: torch.device) -> Tensor:
    """The number of midpoints below all numbers of a cell, or _UNKNOWN: uint8 [_CELLS + 2]."""
    lower = torch.arange(_CELLS + 2, dtype=torch.float64) / (_CELLS / 2) - 1
    midpoints = torch.tensor(MIDPOINTS).double()
    least = torch.bucketize(lower - _ROUNDING, midpoints)
    most = torch.bucketize(lower + 2 / _CELLS + _ROUNDING, midpoints)
    return torch.where(least == most, least, _UNKNOWN).to(torch.uint8).to(device)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes levels times absmax into `out` [n, K]. `wide` is float32 scratch [at least n, K/block]."""
    codes, absmax = planes
    scales = wide[: len(absmax)].copy_(absmax)
    if bitsandbytes_kernels.serves(out.device.type):
        bitsandbytes_kernels.dequantize_nf4(codes, scales, out.shape[1] // scales.shape[1], out)
    else:
        lookup.unpack(codes, VALUES, scales, out)


# The rows of a block in order `nf4pack`; two halves of it share bytes.
BLOCK_ROWS = 32


class FusedCodec:
    """The codec (tensor.Codec) of the same codes in order `nf4pack`."""

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...]) -> None:
        codes, absmax = planes
        numbers, wide = _numbers(weight, absmax.numel())
        absmax.copy_(wide.clamp(max=LARGEST_ABSMAX[weight.dtype]).view(len(weight), -1).t())
        upper, lower = numbers.view(-1, 2, BLOCK_ROWS // 2, weight.shape[1]).unbind(1)
        _pairs(codes).copy_(torch.bitwise_or(upper, lower << 4).view(torch.int16).transpose(1, 2))

    def unpack(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
        codes, absmax = planes
        for rows in row_chunks((len(out), out.shape[1]), BLOCK_ROWS):
            unpack((deinterleave(codes[rows]), absmax[:, rows].t()), out[rows], wide[rows])


def multiply(x: Tensor, planes: tuple[Tensor, ...], out: Tensor) -> None:
    """Writes x [T, K], bfloat16 on a CPU, times the transposed matrix in order `nf4pack` into `out` [T, N].

    The bits of a row depend neither on other rows nor on the number of threads: every row and block of 32 outputs has
    sums of its own, over K in one order.
    """
    codes, absmax = planes
    if not x.shape[0]:
        # The kernel divides by the number of rows.
        return
    if x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    bitsandbytes_kernels.multiply_nf4(x, codes, absmax, x.shape[1] // absmax.shape[0], out)


def interleave(codes: Tensor, out: Tensor) -> None:
    """Writes codes uint8 [n, K/2], row after row, into `out` in order `nf4pack`; n is a multiple of BLOCK_ROWS."""
    upper, lower = codes.view(-1, 2, BLOCK_ROWS // 2, codes.shape[1]).unbind(1)
    # Both columns of two rows at once: their bytes are adjacent in the block.
    pairs = torch.stack((lower & 0xF0 | upper >> 4, lower << 4 | upper & 15), -1).view(torch.int16).squeeze(-1)
    _pairs(out).copy_(pairs.transpose(1, 2))


def deinterleave(codes: Tensor) -> Tensor:
    """The inverse of `interleave`: uint8 [n, K/2] row after row."""
    pairs = _pairs(codes).transpose(1, 2).contiguous()
    first, second = pairs.view(torch.uint8).view(*pairs.shape, 2).unbind(-1)
    return torch.stack((first << 4 | second & 15, first & 0xF0 | second >> 4), 1).view_as(codes)


def _pairs(codes: Tensor) -> Tensor:
    """The bytes of codes [n, K/2] in order `nf4pack`, two at a time: int16 [n/32, K/2, 16]."""
    return codes.view(-1).view(torch.int16).view(-1, codes.shape[1], BLOCK_ROWS // 2)
