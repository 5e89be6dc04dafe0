"""Pairs of weights as points of a plane, in groups of 64 weights of a row: the format of routed experts at 2.75 bits.

A pair of weights is POINTS[code % 16] * scale, negated where the code is 16 or more: 32 points for 5 bits, which lose
less of normal weights than any product of levels with as many (vector quantization: Linde, Buzo and Gray, 1980; of
weights: Chee et al., QuIP#, ICML 2024, arXiv:2402.04396). Scales are bfloat16 [N, K/64]. Coordinates are halves, from
-7.5 to 7.5, so that a point is a byte of two 4-bit codes, in which negation turns every bit.

Of eight columns of a row, the i-th and the (4 + i)-th are a pair; a group has 32 of them. Codes are uint8 [N, 5 K/16].
Of 128 columns of a row, or of 64 where 128 does not divide K, there are bytes with the lower four bits of two pairs
each, so that byte permutes find the points of eight pairs by a word (kernels/decode.py). Then there are bytes with a
bit for each pair: whether its second weight is above 0, as either the point of its lower bits says or its opposite. Of
each group, the two bits of the i-th byte are side by side in the byte i modulo the number of these bytes.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import numpy as np
import torch
from torch import Tensor

from . import lookup
from .format import JOINED_COLUMNS
from .int3 import SMALLEST, bytes_of, runs_of, sum_of

GROUP = 64
# Of 16 points, x + 16 y, coordinates plus 7.5. Found for normal weights in groups with fitted scales: the generalized
# Lloyd algorithm, then single steps on the grid.
POINTS = (0x61, 0x32, 0x83, 0x64, 0xA4, 0x66, 0xC6, 0x37, 0x87, 0xA7, 0x09, 0x7A, 0xBA, 0xEA, 0x2C, 0x5F)
LOW_BITS, MIDDLE = 4, 7.5
# The bits of points whose second coordinate is above 0.
_ABOVE = sum((point >> 7) << at for at, point in enumerate(POINTS))
# How many pairs a byte has the lower bits of, and the upper one.
_LOW, _HIGH = 2, 8
# The bytes of a group with upper bits.
_HIGH_BYTES = 4
# Parts of a group's root mean square that scales are tried with; each is fitted to the points that are nearest then.
STARTS = (0.23, 0.27, 0.32, 0.37, 0.42)
LARGEST_SCALE = torch.finfo(torch.bfloat16).max / 8


def pack(weight: Tensor, planes: tuple[Tensor, ...], importance: Tensor | None = None) -> None:
    """Packs `weight` [n, K], finite. Of the squares of errors the sum is small in which each weight counts by the root
    of the sum of its own square and the mean square of its group, times the `importance` [K] of its column."""
    codes, scales = planes
    groups = weight.float().view(len(weight), -1, GROUP)
    farthest = groups.abs().amax(2, keepdim=True)
    farthest = farthest.masked_fill(farthest < SMALLEST, 0)
    numbers = groups / _or_one(farthest)
    squares = numbers * numbers
    mean = sum_of(in_pairs(squares).flatten(2)) / GROUP
    # Torch's root is not rounded correctly everywhere.
    weights = torch.from_numpy(np.sqrt((squares + mean).numpy()))
    if importance is not None:
        weights *= importance.view(-1, GROUP)
    pairs, weights = in_pairs(numbers), in_pairs(weights)
    step = _best_step(pairs, weights, torch.from_numpy(np.sqrt(mean.numpy())))
    scales.copy_((step * farthest).clamp_(max=LARGEST_SCALE).squeeze(2))
    *_, found = _nearest(in_pairs(groups) / _or_one(scales.float())[:, :, None, None], weights)
    codes.copy_(join_rows(found.flatten(1)))


def _or_one(divisors: Tensor) -> Tensor:
    return divisors.masked_fill(divisors == 0, 1)


def in_pairs(groups: Tensor) -> Tensor:
    """[..., K] to [..., 2, K/2]: the first and the second of all pairs."""
    return groups.reshape(*groups.shape[:-1], -1, 2, 4).transpose(-3, -2).flatten(-2)


def points_of(codes: Tensor) -> Tensor:
    """The pairs of numbers [..., 2, n], float32, of codes [..., n]."""
    points = torch.tensor([[point & 15, point >> 4] for point in POINTS], dtype=torch.float32) - MIDDLE
    return torch.cat([points, -points]).to(codes.device)[codes.long()].movedim(-1, -2)


def _best_step(pairs: Tensor, weights: Tensor, root: Tensor) -> Tensor:
    """The scale [n, G, 1] of pairs [n, G, 2, 32] that loses least; `root` is that of the mean square of each group."""
    most, step = torch.zeros_like(root), torch.ones_like(root)
    for start in STARTS:
        tried = _or_one(root * start)
        lost, product, _ = _nearest(pairs / tried.unsqueeze(3), weights)
        product = product.abs()
        whole = sum_of(lost + product)
        fitted = sum_of(product) * 0.5 / whole * tried
        gained = fitted * fitted * whole
        step = torch.where(gained > most, fitted, step)
        most = torch.where(gained > most, gained, most)
    return step


def _nearest(pairs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the points nearest to pairs [..., 2, n], by squares of errors that count by `weights`: what they lose, less
    what all do; twice their products with the pairs; and their codes, uint8 [..., n].

    Of a point p and its opposite, w (x - p)^2 is w x^2 and, at the least, w p^2 - |2 w x p|.
    """
    (w, v), (x, y) = weights.unbind(-2), (weights * pairs * 2).unbind(-2)
    best, best_product = torch.full_like(x, torch.inf), torch.zeros_like(x)
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for code, (a, b) in enumerate(points_of(torch.arange(len(POINTS))).T.tolist()):
        product = x * a + y * b
        lost = w * (a * a) + v * (b * b) - product.abs()
        nearer = lost < best
        best, best_product = torch.where(nearer, lost, best), torch.where(nearer, product, best_product)
        codes.masked_fill_(nearer, code)
    return best, best_product, codes + best_product.signbit().to(torch.uint8) * 16


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes the matrix into `out` [n, K], rounded once from float32."""
    codes, scales = planes
    points = _points(out.device)
    for rows in lookup.chunks_of(out):
        found = points.index_select(0, split_rows(codes[rows]).int().view(-1)).view(torch.float32)
        eights = found.view(-1, scales.shape[1], GROUP // 8, 4, 2).transpose(3, 4)
        torch.mul(eights, scales[rows].float()[:, :, None, None, None], out=out[rows].view_as(eights))


@cache
def _points(device: torch.device) -> Tensor:
    """The pairs of numbers of all codes, float32, as the bits of one int64 [32]."""
    return points_of(torch.arange(2 * len(POINTS))).T.contiguous().view(torch.int64).view(-1).to(device)


def join_rows(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 31, uint8 [n, K/2], of pairs from the first columns on, as codes [n, 5 K/16]."""
    groups = gcd(2 * numbers.shape[1], JOINED_COLUMNS) // GROUP
    chunks = _by_second(numbers).view(len(numbers), -1, GROUP // 2 * groups)
    upper = (chunks >> LOW_BITS).view(*chunks.shape[:2], groups, -1, _HIGH_BYTES * groups, 2)
    high = bytes_of(upper.permute(0, 1, 3, 2, 5, 4).flatten(2), _HIGH, _HIGH_BYTES * groups)
    return torch.cat([bytes_of(chunks & 15, _LOW, 1), high], 2).flatten(1)


def split_rows(codes: Tensor) -> Tensor:
    """The inverse of `join_rows`."""
    groups = gcd(codes.shape[1] // 5 * 16, JOINED_COLUMNS) // GROUP
    chunks = codes.view(len(codes), -1, 5 * _HIGH_BYTES * groups)
    low, high = chunks.tensor_split([4 * _HIGH_BYTES * groups], 2)
    upper = runs_of(high, _HIGH, _HIGH_BYTES * groups).view(*chunks.shape[:2], -1, groups, 2, _HIGH_BYTES * groups)
    upper = upper.permute(0, 1, 3, 2, 5, 4).flatten(2)
    return _by_second(torch.bitwise_or(runs_of(low, _LOW, 1), upper << LOW_BITS).flatten(1))


def _by_second(numbers: Tensor) -> Tensor:
    """Numbers from 0 to 31 whose upper bit says that a pair's second weight is above 0, instead of whether it is the
    opposite of a point; and the other way."""
    above = _ABOVE >> (numbers & 15).to(torch.int32) & 1
    return numbers ^ above.to(torch.uint8) << LOW_BITS
