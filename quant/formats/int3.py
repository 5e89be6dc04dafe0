"""3-bit integers in groups of 32 weights of a row, each group with a scale: the format of routed experts at 3.5 bits.

weight = (code - 4) * scale, with codes from 0 to 7 and scales bfloat16 [N, K/32] of either sign: -4 times it is the
weight farthest from 0, which no code on the other side could hold. A zero beside the scale would lose more: its
rounding is the same for all weights of a group, and products add it up (bench/results/quality.md).

Codes are uint8 [N, 3 K/8]. Those of 32 columns of a row are 12 bytes: eight with the lower two bits of four columns
each, then four with the upper bit of eight columns each, the first column in the lowest bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import lookup
from .int8 import ROUNDER

GROUP = 32
# The code of a weight of 0.
MIDDLE = 4
# Below this, a group's weights are taken for 0.
SMALLEST = 1e-30
LARGEST_SCALE = torch.finfo(torch.bfloat16).max / MIDDLE
# How often codes and scale are fitted to each other; a third time changes little.
FITS = 2


def pack(weight: Tensor, planes: tuple[Tensor, ...], importance: Tensor | None = None) -> None:
    """Packs `weight` [n, K], finite. Of the squares of errors the sum is small in which each weight counts by its own
    square and the mean square of its group; with the `importance` [K] of columns by that and the root of their sum."""
    codes, scales = planes
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    farthest = torch.where(-low > high, low, high)
    unit = farthest.masked_fill(farthest.abs() < SMALLEST, 1)
    numbers = groups / unit
    squares = numbers * numbers
    weights = squares + sum_of(squares) / GROUP
    if importance is not None:
        # Torch's root is not rounded correctly everywhere.
        weights = torch.from_numpy(np.sqrt(weights.numpy())) * importance.view(-1, GROUP)
    step = torch.full_like(unit, -1 / MIDDLE)
    for _ in range(FITS):
        steps = _steps(numbers, step)
        weighted = weights * steps
        whole = sum_of(weighted * steps)
        step = torch.where(whole > 0, sum_of(weighted * numbers) / whole, step)
    scales.copy_((step * unit).clamp_(-LARGEST_SCALE, LARGEST_SCALE).squeeze(2))
    numbers = _steps(groups, scales.float().unsqueeze(2)).add_(MIDDLE)
    codes.copy_(join(numbers.to(torch.uint8)).flatten(1))


def _steps(numbers: Tensor, step: Tensor) -> Tensor:
    """Codes less MIDDLE, float32."""
    return torch.div(numbers, step).add_(ROUNDER).sub_(ROUNDER).clamp_(-MIDDLE, MIDDLE - 1)


def sum_of(groups: Tensor) -> Tensor:
    """[..., GROUP] to [..., 1], halves added to each other: an order that kernels have, too."""
    while groups.shape[-1] > 1:
        first, second = groups.chunk(2, -1)
        groups = first + second
    return groups


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes the matrix into `out` [n, K], rounded once from float32."""
    codes, scales = planes
    for rows in lookup.chunks_of(out):
        groups = split(codes[rows].reshape(-1, codes.shape[1] // 12, 12)).float().sub_(MIDDLE)
        # A number for each weight: on a CPU, multiplying by one number a group would start a loop for every group.
        groups.mul_(scales[rows].float().unsqueeze(2).expand_as(groups).contiguous())
        out[rows].copy_(groups.flatten(1))


def join(numbers: Tensor, width: int = 1, low: int = 2) -> Tensor:
    """Numbers of `low` + 1 bits, uint8 [..., n * width], as bytes: first those of runs of `width` numbers with their
    lower bits, of as many runs as a byte has room for, then `width` for every eight runs with the upper one."""
    lower = (numbers & (1 << low) - 1).view(*numbers.shape[:-1], -1, 8 // low, width) << _shifts(numbers, 8 // low)
    upper = (numbers >> low).view(*numbers.shape[:-1], -1, 8, width) << _shifts(numbers, 8)
    return torch.cat([each.sum(-2, dtype=torch.uint8).flatten(-2) for each in (lower, upper)], -1)


def split(codes: Tensor, width: int = 1, low: int = 2) -> Tensor:
    """The inverse of `join`."""
    end = codes.shape[-1] * low // (low + 1)
    lower = codes[..., :end].reshape(*codes.shape[:-1], -1, 1, width) >> _shifts(codes, 8 // low) & (1 << low) - 1
    upper = codes[..., end:].reshape(*codes.shape[:-1], -1, 1, width) >> _shifts(codes, 8) & 1
    return torch.bitwise_or(lower.flatten(-3), upper.flatten(-3) << low)


def _shifts(like: Tensor, count: int) -> Tensor:
    """Where the parts of `count` numbers begin in a byte: [count, 1]."""
    return torch.arange(0, 8, 8 // count, dtype=torch.uint8, device=like.device)[:, None]
