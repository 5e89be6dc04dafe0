"""4-bit NormalFloat (Dettmers et al. 2023, QLoRA) in blocks of weights of a row.

Planes: codes uint8 [N, K/2], the first of two weights in the high bits; absmax [N, K/block], bfloat16 in format `nf4`.
Codes are bit-identical to those of bitsandbytes 0.50: the float32 absmax determines them and is rounded afterwards.

In order `nf4pack` (FusedCodec) they lie as bitsandbytes' fused product reads them: by blocks of 32 rows whose bytes are
ordered as [K/2, 32]. Byte 2 i + p of a pair of columns has column p of row i in the low bits and of row 16 + i in the
high bits. absmax is bfloat16 [K/block, N].
"""

from itertools import pairwise

import torch
from torch import Tensor

from . import bitsandbytes_kernels, lookup
from .chunks import row_chunks

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
    blocks = weight.float().reshape(absmax.numel(), -1)
    scaled = blocks.abs()
    wide = scaled.amax(1)
    absmax.view(-1).copy_(wide.clamp(max=LARGEST_ABSMAX[weight.dtype]))
    torch.mul(blocks, wide.clamp_(min=SMALLEST_ABSMAX).reciprocal_()[:, None], out=scaled)
    # Converts through int16, because float32 to uint8 is several times slower.
    first, second = _nearest_levels(scaled).to(torch.int16).view(len(codes), -1, 2).unbind(-1)
    torch.add(second, first, alpha=16, out=codes)


def _nearest_levels(scaled: Tensor) -> Tensor:
    """Indices into LEVELS for numbers in [-1, 1], as float32: the number of midpoints below each.

    Fifteen vectorized comparisons are four times as fast as the binary search of torch.bucketize. They write float32
    because comparisons that write bool are not vectorized.
    """
    counts, above = torch.zeros_like(scaled), torch.empty_like(scaled)
    for midpoint in MIDPOINTS:
        counts.add_(torch.gt(scaled, midpoint, out=above))
    return counts


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes levels times absmax into `out` [n, K]. `wide` is float32 scratch [at least n, K/block]."""
    codes, absmax = planes
    scales = wide[: len(absmax)].copy_(absmax)
    if bitsandbytes_kernels.serves(out.device.type):
        bitsandbytes_kernels.dequantize_nf4(codes, scales, out.shape[1] // scales.shape[1], out)
    else:
        lookup.unpack(codes, VALUES, scales, out)


def unpack_unscaled(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """Writes the matrix into `out`; no scales are left to apply."""
    weight = out[: len(planes[0])]
    unpack(planes, weight, wide)
    return weight, None


# The rows of a block in order `nf4pack`; two halves of it share bytes.
BLOCK_ROWS = 32


class FusedCodec:
    """The codec (tensor.Codec) of the same codes in order `nf4pack`."""

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...]) -> None:
        codes, absmax = planes
        in_rows = torch.empty_like(codes), absmax.new_empty(len(weight), len(absmax))
        pack(weight, in_rows)
        interleave(in_rows[0], codes)
        absmax.copy_(in_rows[1].t())

    def unpack(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
        codes, absmax = planes
        for rows in row_chunks((len(out), out.shape[1]), BLOCK_ROWS):
            unpack((deinterleave(codes[rows]), absmax[:, rows].t()), out[rows], wide[rows])

    def unpack_unscaled(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = out[: len(planes[0])]
        self.unpack(planes, weight, wide)
        return weight, None


def multiply(x: Tensor, planes: tuple[Tensor, ...], out: Tensor) -> None:
    """Writes x [T, K], bfloat16 on a CPU, times the transposed matrix in order `nf4pack` into `out` [T, N].

    The bits of a row depend neither on other rows nor on the number of threads: every row and block of 32 outputs has
    sums of its own, over K in one order.
    """
    codes, absmax = planes
    if not len(x):
        # The kernel divides by the number of rows.
        return
    if x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    bitsandbytes_kernels.multiply_nf4(x, codes, absmax, x.shape[1] // len(absmax), out)


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
