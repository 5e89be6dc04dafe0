"""4-bit integers in torch's order: codes in groups of weights of a row, each group with a scale and perhaps a zero.

weight = (code - 8) * scale + zero, with codes from 0 to 15. The codes lie as torch's `_weight_int4pack_mm_for_cpu`
reads them on AVX-512: uint8 [N, K/2], whose bytes are ordered as [N/64, K, 32], by blocks of 64 rows, and byte i of a
column has row i in the low bits and row 32 + i in the high bits. N is padded to whole blocks. Scales and zeros lie

- as that kernel reads them: bfloat16 [K/group, N, 2], scale and zero (format `int4`), or
- as checkpoints have them: scales [K/group, N] and perhaps zero points uint8 [K/group, N], where
  weight = (code - zero point) * scale; with factors float16 [K/256, N, 2] (`q4_k`), both are integers, and
  weight = code * scale * first factor - zero point * second factor.
"""

from functools import cache

import torch
from torch import Tensor

from . import lookup
from .format import FormatError
from .int8 import ROUNDER

BLOCK_ROWS = 64
NUM_CODES = 16
# A lower bound, so that the scale of a group of equal weights is a normal number.
SMALLEST_SCALE = 1e-30
LARGEST_ZERO = torch.finfo(torch.bfloat16).max


def pack(weight: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Packs `weight` [n, K], finite; the codes of a group are spread evenly from its smallest to its largest weight.

    Raises FormatError unless zeros are floats: other formats only keep what checkpoints have.
    """
    codes, scales = planes[:2]
    check_zeros(scales)
    nibbles = torch.zeros(len(codes), weight.shape[1])
    scale, zero = scales[:, : len(weight)].transpose(0, 1).unbind(2)
    nibbles[: len(weight)] = quantize(weight, scale, zero)
    scales[:, len(weight) :].zero_()
    interleave(nibbles, codes)


ONLY_KEPT = "Matrices are not quantized to 4-bit integers with zero points; use int4."


def check_zeros(scales: Tensor) -> None:
    """Raises FormatError unless scales have float zeros beside them."""
    if scales.dim() < 3:
        raise FormatError(ONLY_KEPT)


def quantize(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Fills scale and zero [n, G]; returns the codes of `weight` [n, K] as float32 [n, K]."""
    groups = weight.float().view(len(weight), scale.shape[1], -1)
    low, high = groups.amin(2), groups.amax(2)
    exact = high / (NUM_CODES - 1) - low / (NUM_CODES - 1)
    scale.copy_(exact.clamp(min=SMALLEST_SCALE))
    # The middle of the codes, 7.5, represents the middle of the weights, half a step below code 8.
    zero.copy_((low / 2 + high / 2 + exact / 2).clamp_(-LARGEST_ZERO, LARGEST_ZERO))
    rounded = torch.div(groups - zero.float()[..., None], scale.float()[..., None])
    return rounded.add_(ROUNDER + 8).sub_(ROUNDER).clamp_(0, NUM_CODES - 1).view(weight.shape)


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
        return scale, zero
    if not zeros:
        return scales, torch.zeros_like(scales)
    if zeros[0].is_floating_point():
        return scales, zeros[0].float()
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
    scales = planes[1]
    if scales.dim() == 3:
        return scales
    scale, zero = scale_and_zero(planes)
    # Both halves of an int32. Each of these operations takes a tenth of what writing every other element takes.
    pairs = _bits(scale)
    if len(planes) > 2:
        pairs.add_(_bits(zero), alpha=1 << 16)
    return pairs.view(torch.bfloat16).view(*scales.shape, 2)


def _bits(numbers: Tensor) -> Tensor:
    """float32 rounded to bfloat16, as the lower bits of int32."""
    return numbers.bfloat16().view(torch.uint16).to(torch.int32)


class RowCodec:
    """The codec (tensor.Codec) of the same codes row after row, the first of two in the low bits of a byte.

    Scales and zeros have their groups on the second axis, and zeros of a float dtype are a plane of their own. GPU
    kernels read this order.
    """

    VALUES = lookup.Values(tuple(float(code - NUM_CODES // 2) for code in range(NUM_CODES)))

    def pack(self, weight: Tensor, planes: tuple[Tensor, ...]) -> None:
        """As int4.pack. Raises FormatError unless zeros are floats."""
        codes, scales, *zeros = planes
        if not zeros or not zeros[0].is_floating_point():
            raise FormatError(ONLY_KEPT)
        first, second = quantize(weight, scales, zeros[0]).view(*codes.shape, 2).unbind(2)
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
