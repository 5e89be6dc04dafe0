"""3-bit integers in groups of 32 weights of a row, each group with a scale: the format of routed experts at 3.5 bits.

weight = (code - 4) * scale, with codes from 0 to 7 and scales bfloat16 [N, K/32] of either sign: whether there are four
steps above 0 or below it is as the group's weights want it. A zero beside the scale would lose more: its rounding is
the same for all weights of a group, and products add it up (bench/results/quality.md).

Codes are uint8 [N, 3 K/8]. Of 128 columns of a row, [4, 16, 2] as [group, pair, parity], there are 48 bytes: 16 with
the lower two bits of groups 0 and 1, 16 with those of groups 2 and 3, and 16 with the upper bits of all. A byte belongs
to a pair; its lower half has the even column of each group, the first in the lowest bits, and the upper half the odd
ones, so that two masks find the codes of eight columns in a word (kernels/decode.py). Where 128 does not divide K, 64
or 32 columns lie together, with several pairs in a byte, one after the other.
"""

from __future__ import annotations

from math import gcd

import numpy as np
import torch
from torch import Tensor

from . import lookup
from .format import JOINED_COLUMNS
from .int8 import ROUNDER

GROUP = 32
# The code of a weight of 0.
MIDDLE = 4
# What codes stand for, in steps of a scale.
LEVELS = tuple(float(code - MIDDLE) for code in range(8))
# Below this, a group's weights are taken for 0.
SMALLEST = 1e-30
LARGEST_SCALE = torch.finfo(torch.bfloat16).max / MIDDLE
# Parts of the weight farthest from 0 that scales are tried with, of either sign; each is fitted to the codes that are
# nearest then. Where few columns count, most of what one start loses more is another's (bench/results/quality.md).
STARTS = (0.15, 0.17, 0.19, 0.21, 0.23, 0.25, 0.275, 0.3)


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
    step = _best_step(numbers, weights)
    scales.copy_((step * unit).clamp_(-LARGEST_SCALE, LARGEST_SCALE).squeeze(2))
    numbers = _steps(groups, scales.float().unsqueeze(2)).add_(MIDDLE)
    codes.copy_(join_rows(numbers.to(torch.uint8).flatten(1)))


def _best_step(numbers: Tensor, weights: Tensor) -> Tensor:
    """The scale [n, G, 1] of numbers [n, G, GROUP] that loses least of those tried, then fitted to its own codes."""
    step = torch.full_like(numbers[..., :1], -1 / MIDDLE)
    most = torch.zeros_like(step)
    for start in (sign * start for start in STARTS for sign in (-1, 1)):
        product, whole = _sums(numbers, weights, torch.full_like(step, start))
        gained = product * product / whole
        step = torch.where(gained > most, product / whole, step)
        most = torch.where(gained > most, gained, most)
    product, whole = _sums(numbers, weights, step)
    return torch.where(whole > 0, product / whole, step)


def _sums(numbers: Tensor, weights: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Of the codes of a scale, in steps: their weighted products with the numbers, and their weighted squares."""
    steps = _steps(numbers, step)
    weighted = weights * steps
    return sum_of(weighted * numbers), sum_of(weighted * steps)


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
        steps = split_rows(codes[rows]).view(torch.int8).sub_(MIDDLE).view(-1, scales.shape[1], GROUP)
        torch.mul(steps, scales[rows].float().unsqueeze(2), out=out[rows].view_as(steps))


# How many columns a byte has the lower two bits of, and the upper one.
_LOW, _HIGH = 4, 8


def join_rows(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 7, uint8 [n, K], as codes [n, 3 K/8]."""
    chunks = numbers.view(len(numbers), -1, gcd(numbers.shape[1], JOINED_COLUMNS))
    (low, pairs), (high, others) = (_arranged(chunks, count) for count in (_LOW, _HIGH))
    return torch.cat([bytes_of(low & 3, _LOW, pairs), bytes_of(high >> 2, _HIGH, others)], 2).flatten(1)


def split_rows(codes: Tensor) -> Tensor:
    """The inverse of `join_rows`."""
    columns = gcd(codes.shape[1] // 3 * 8, JOINED_COLUMNS)
    planes = codes.view(len(codes), -1, columns * 3 // 8).tensor_split([columns // _LOW], 2)
    low, high = (_in_order(plane, count, columns) for plane, count in zip(planes, (_LOW, _HIGH), strict=True))
    return torch.bitwise_or(low, high << 2)


def _together(columns: int, count: int) -> tuple[int, int]:
    """Of `columns`, `count` of them a byte: the groups that a byte has columns of, and the bytes of these groups."""
    groups = min(columns // GROUP, count // 2)
    return groups, groups * GROUP // count


def _arranged(chunks: Tensor, count: int) -> tuple[Tensor, int]:
    """Columns [n, chunks, C] in the order in which every `count` runs share bytes, and the length of a run."""
    groups, width = _together(chunks.shape[2], count)
    parts = chunks.view(*chunks.shape[:2], -1, groups, GROUP // 2 // width, width, 2)
    return parts.permute(0, 1, 2, 4, 6, 3, 5).flatten(2), width


def _in_order(plane: Tensor, count: int, columns: int) -> Tensor:
    """The bits of a plane [n, chunks, columns / count] by columns: [n, K]."""
    groups, width = _together(columns, count)
    parts = runs_of(plane, count, width).view(*plane.shape[:2], -1, GROUP // 2 // width, 2, groups, width)
    return parts.permute(0, 1, 2, 5, 3, 6, 4).flatten(1)


def join(numbers: Tensor, width: int, low: int = 2) -> Tensor:
    """Numbers of `low` + 1 bits, uint8 [..., n * width], as bytes: first those of runs of `width` numbers with their
    lower bits, of as many runs as a byte has room for, then `width` for every eight runs with the upper one."""
    lower, upper = numbers & (1 << low) - 1, numbers >> low
    return torch.cat([bytes_of(lower, 8 // low, width), bytes_of(upper, _HIGH, width)], -1)


def split(codes: Tensor, width: int, low: int = 2) -> Tensor:
    """The inverse of `join`."""
    lower, upper = codes.tensor_split([codes.shape[-1] // (low + 1) * low], -1)
    return torch.bitwise_or(runs_of(lower, 8 // low, width), runs_of(upper, _HIGH, width) << low)


def bytes_of(bits: Tensor, count: int, width: int) -> Tensor:
    """Every `count` runs of `width` numbers of 8 / `count` bits as `width` bytes, the first in the lowest bits."""
    runs = bits.view(*bits.shape[:-1], -1, count, width) << _shifts(bits, count)
    return runs.sum(-2, dtype=torch.uint8).flatten(-2)


def runs_of(plane: Tensor, count: int, width: int) -> Tensor:
    """The inverse of `bytes_of`."""
    runs = plane.reshape(*plane.shape[:-1], -1, 1, width) >> _shifts(plane, count)
    return (runs & (1 << 8 // count) - 1).flatten(-3)


def _shifts(like: Tensor, count: int) -> Tensor:
    """Where the parts of `count` numbers begin in a byte: [count, 1]."""
    return torch.arange(0, 8, 8 // count, dtype=torch.uint8, device=like.device)[:, None]
