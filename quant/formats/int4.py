"""4-bit integers from 0 to 15, in groups of weights of a row, each group with a scale and perhaps a zero.

- Format `int4`: weight = (code - zero / 16) * scale * factor. Scales (1 to 255) and zeros (0 to 255) are uint8
  [N, K/group, 2], beside each other; factors are float32 [N]. A group's codes reach from its smallest weight, or 0, to
  its largest, or 0, and the widest group of a row has the scale 255.
- As checkpoints have them: weight = (code - 8) * scale, or with zero points uint8 weight = (code - zero point) * scale;
  with factors float16 [K/256, N, 2] (`q4_k`), both are integers, and weight = code * scale * first factor - zero point
  * second factor.

In torch's order, which the latter have, codes lie as `_weight_int4pack_mm_for_cpu` reads them on AVX-512: uint8
[N, K/2], whose bytes are ordered as [N/64, K, 32], by blocks of 64 rows, and byte i of a column has row i in the low
bits and row 32 + i in the high bits. N is padded to whole blocks; scales and zero points are [K/group, N].
"""

from functools import cache

import torch
from torch import Tensor

from . import lookup
from .format import FormatError
from .int8 import ROUNDER

BLOCK_ROWS = 64
NUM_CODES = 16
# Of a step, that zeros count.
ZERO_STEPS = 16
LARGEST_SCALE = 255
# A lower bound, so that the step of a row of zeros is a normal number.
SMALLEST_FACTOR = 1e-36


ONLY_KEPT = "Matrices are not quantized to 4-bit integers as checkpoints have them; use int4."


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Raises FormatError: formats in this order only keep what checkpoints have."""
    raise FormatError(ONLY_KEPT)


def quantize(weight: Tensor, pairs: Tensor, factors: Tensor) -> Tensor:
    """Fills the planes of scales and factors for `weight` [n, K], finite; returns its codes as float32 [n, K]."""
    groups = weight.float().view(len(weight), pairs.shape[1], -1)
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    exact = high / (NUM_CODES - 1) - low / (NUM_CODES - 1)
    factors.copy_((exact.amax(1) / LARGEST_SCALE).clamp_(min=SMALLEST_FACTOR))
    # Rounded up, so that codes reach both ends.
    scale = torch.div(exact, factors[:, None]).ceil_().clamp_(1, LARGEST_SCALE)
    step = scale * factors[:, None]
    zero = torch.div(-low, step).mul_(ZERO_STEPS).add_(ROUNDER).sub_(ROUNDER)
    pairs.copy_(torch.stack((scale, zero), 2))
    codes = torch.div(groups, step[..., None]).add_(zero.div_(ZERO_STEPS)[..., None])
    return codes.add_(ROUNDER).sub_(ROUNDER).clamp_(0, NUM_CODES - 1).view(weight.shape)


def interleave(nibbles: Tensor, codes: Tensor) -> None:
    """Writes `nibbles`, numbers from 0 to 15 [N, K] of whole blocks, into `codes` uint8 [N, K/2] in torch's order."""
    # Through int32, because float32 to uint8 is several times slower.
    numbers = nibbles.to(torch.int32).to(torch.uint8)
    lower, upper = numbers.view(-1, 2, BLOCK_ROWS // 2, nibbles.shape[1]).unbind(1)
    _blocks(codes).copy_(torch.bitwise_or(lower, upper << 4).transpose(1, 2))


def scale_and_zero(planes: tuple[Tensor, ...], axis: int = 0) -> tuple[Tensor, Tensor]:
    """The scale and the zero of every group, float32 in the shape of scales; `axis` is the axis of their groups."""
    scales, *zeros = planes[1].float(), *planes[2:]
    if scales.dim() == 3:
        scale, zero = scales.unbind(2)
        factor = zeros[0][:, None]
        return scale * factor, zero.div(-ZERO_STEPS).add_(NUM_CODES / 2).mul_(scale).mul_(factor)
    if not zeros:
        return scales, torch.zeros_like(scales)
    if len(zeros) == 1:
        return scales, zeros[0].float().neg_().add_(NUM_CODES / 2).mul_(scales)
    spread = scales.shape[axis] // zeros[1].shape[axis]
    factor, least = (part.repeat_interleave(spread, axis) for part in zeros[1].float().unbind(2))
    scale = scales.mul_(factor)
    return scale, torch.addcmul(scale * (NUM_CODES / 2), zeros[0].float(), least, value=-1)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes the matrix into `out` [n, K], rounded once from float32."""
    codes = planes[0]
    levels = out.new_empty(out.shape[1], len(codes), dtype=torch.float32)
    _write_levels(codes, levels, wide)
    scale, zero = scale_and_zero(planes)
    groups = levels.view(len(scale), -1, len(codes)).sub_(NUM_CODES / 2)
    torch.addcmul(zero.unsqueeze(1), groups, scale.unsqueeze(1), out=groups)
    out.copy_(levels.t()[: len(out)])


def unpack_unscaled(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> tuple[Tensor, Tensor | None]:
    """Writes the matrix into `out`, transposed like its codes; no scales are left to apply."""
    codes = planes[0]
    levels = out.view(-1)[: out.shape[1] * len(codes)].view(out.shape[1], len(codes))
    _write_levels(codes, levels, wide)
    scale, zero = scale_and_zero(planes)
    # This takes one pass over the weights; subtracting 8 first would take two.
    offset = torch.add(zero, scale, alpha=-NUM_CODES / 2).to(out.dtype)
    groups = levels.view(len(scale), -1, len(codes))
    torch.addcmul(offset.unsqueeze(1), groups, scale.to(out.dtype).unsqueeze(1), out=groups)
    return levels.t(), None


def multiply(x: Tensor, planes: tuple[Tensor, ...]) -> Tensor:
    """x [T, K], bfloat16 on a CPU, times the transposed matrix: a new tensor [T, N rounded up to whole blocks].

    Uses torch's kernel, which dequantizes codes on the fly and is fast for few rows; it reads scales in bfloat16.
    """
    return torch._weight_int4pack_mm_for_cpu(x, planes[0], x.shape[1] // len(planes[1]), _pairs(planes))


def _pairs(planes: tuple[Tensor, ...]) -> Tensor:
    """Scale and zero of every group as torch's kernel reads them: bfloat16 [K/group, N, 2].

    With few rows this takes longer than the product, if it is written element by element.
    """
    scale, zero = scale_and_zero(planes)
    # Both halves of an int32. Each of these operations takes a tenth of what writing every other element takes.
    pairs = _bits(scale)
    if len(planes) > 2:
        pairs.add_(_bits(zero), alpha=1 << 16)
    return pairs.view(torch.bfloat16).view(*scale.shape, 2)


def _bits(numbers: Tensor) -> Tensor:
    """float32 rounded to bfloat16, as the lower bits of int32."""
    return numbers.bfloat16().view(torch.uint16).to(torch.int32)


class RowCodec:
    """The codec (tensor.Codec) of the same codes row after row, the first of two in the low bits of a byte.

    Scales and zeros have their groups on the second axis. GPU kernels read this order.
    """

    VALUES = lookup.Values(tuple(float(code - NUM_CODES // 2) for code in range(NUM_CODES)))

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...]) -> None:
        """Packs `weight` [n, K], finite. Raises FormatError in formats that only keep what checkpoints have."""
        codes, scales, *factors = planes
        if scales.dim() < 3:
            raise FormatError(ONLY_KEPT)
        first, second = quantize(weight, scales, factors[0]).view(*codes.shape, 2).unbind(2)
        codes.copy_(second.mul(NUM_CODES).add_(first).to(torch.int32))

    def unpack(self, planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
        scale, zero = scale_and_zero(planes, axis=1)
        lookup.unpack(planes[0], self.VALUES, scale, out, zero)


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
