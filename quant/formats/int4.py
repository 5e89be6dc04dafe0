"""Format `int4`: 4-bit codes in groups of 32 weights of a row, each group with a scale and a zero point.

weight = (code - 8) * scale + zero, with codes from 0 to 15. The planes have the layout that torch's
`_weight_int4pack_mm_for_cpu` reads on AVX-512. Codes are uint8 [N, K/2]; their bytes are ordered as [N/64, K, 32], by
blocks of 64 rows, and byte i of a column has row i in the low bits and row 32 + i in the high bits. Scales are bfloat16
[K/32, N, 2], scale and zero. N is padded to whole blocks.
"""

from functools import cache

import torch
from torch import Tensor

from .int8 import ROUNDER

GROUP = 32
BLOCK_ROWS = 64
NUM_CODES = 16
# A lower bound, so that the scale of a group of equal weights is a normal number.
SMALLEST_SCALE = 1e-30
LARGEST_ZERO = torch.finfo(torch.bfloat16).max


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Packs `weight` [n, K], finite; the codes of a group are spread evenly from its smallest to its largest weight."""
    codes, scales = planes
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scale, zero = scales[:, : len(weight)].transpose(0, 1).unbind(2)
    exact = high / (NUM_CODES - 1) - low / (NUM_CODES - 1)
    scale.copy_(exact.clamp(min=SMALLEST_SCALE))
    # The middle of the codes, 7.5, represents the middle of the weights, half a step below code 8.
    zero.copy_((low / 2 + high / 2 + exact / 2).clamp_(-LARGEST_ZERO, LARGEST_ZERO))
    nibbles = torch.zeros(len(codes), weight.shape[1])
    rounded = nibbles[: len(weight)].view_as(groups)
    torch.div(groups - zero.float()[..., None], scale.float()[..., None], out=rounded)
    rounded.add_(ROUNDER + 8).sub_(ROUNDER).clamp_(0, NUM_CODES - 1)
    scales[:, len(weight) :].zero_()
    halves = nibbles.to(torch.int16).view(-1, 2, BLOCK_ROWS // 2, weight.shape[1])
    _blocks(codes).copy_(halves[:, 1].mul_(NUM_CODES).add_(halves[:, 0]).transpose(1, 2))


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes the matrix into `out` [n, K], as precisely as its dtype allows."""
    codes, scales = planes
    levels = out.new_empty(out.shape[1], len(codes))
    _write_levels(codes, levels, wide)
    groups = levels.view(len(scales), GROUP, -1).sub_(NUM_CODES / 2)
    scale, zero = (part.to(out.dtype) for part in scales.unsqueeze(1).unbind(3))
    torch.addcmul(zero, groups, scale, out=groups)
    out.copy_(levels.t()[: len(out)])


def unpack_unscaled(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """Writes the matrix into `out`, transposed like its codes; no scales are left to apply."""
    codes, scales = planes
    levels = out.view(-1)[: out.shape[1] * len(codes)].view(out.shape[1], len(codes))
    _write_levels(codes, levels, wide)
    scale, zero = scales.float().unbind(2)
    # This takes one pass over the weights; subtracting 8 first would take two.
    offset = torch.add(zero, scale, alpha=-NUM_CODES / 2).to(out.dtype)
    groups = levels.view(len(scales), GROUP, -1)
    torch.addcmul(offset.unsqueeze(1), groups, scale.to(out.dtype).unsqueeze(1), out=groups)
    return levels.t(), None


def multiply(x: Tensor, planes: tuple[Tensor, ...]) -> Tensor:
    """x [T, K], bfloat16 on a CPU, times the transposed matrix: a new tensor [T, N rounded up to whole blocks].

    Uses torch's kernel, which dequantizes codes on the fly and is fast for few rows.
    """
    codes, scales = planes
    return torch._weight_int4pack_mm_for_cpu(x, codes, GROUP, scales)


@cache
def has_kernel() -> bool:
    """Whether `multiply` can be used here; on other processors the kernel expects the codes in another order."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _write_levels(codes: Tensor, levels: Tensor, wide: Tensor) -> None:
    """Writes the codes as numbers from 0 to 15 into `levels` [K, rows]."""
    blocks = _blocks(codes)
    nibbles = wide.view(-1).view(torch.uint8)[: codes.numel()].view_as(blocks)
    halves = levels.view(len(levels), -1, 2, BLOCK_ROWS // 2)
    torch.bitwise_and(blocks, NUM_CODES - 1, out=nibbles)
    halves[:, :, 0].copy_(nibbles.transpose(0, 1))
    torch.bitwise_right_shift(blocks, 4, out=nibbles)
    halves[:, :, 1].copy_(nibbles.transpose(0, 1))


def _blocks(codes: Tensor) -> Tensor:
    """The bytes of codes [N, K/2] in memory order: [N/64, K, 32]."""
    return codes.view(-1, codes.shape[1] * 2, BLOCK_ROWS // 2)
