"""2-bit codes in groups of 32 weights of a row, each group with a scale: the format of routed experts at 2.25 bits.

weight = value * scale * factor, with values from -62 to 65, scales uint8 [N, K/32] from 1 to 255, factors float32 [N].
A value is looked up by four codes, the weight's own and those of the three before it in a walk through the group: a
trellis of 64 states, each followed by four (bitshift trellis: Tseng et al., QTIP, NeurIPS 2024, arXiv:2406.11235). The
walk that loses least is found by Viterbi's algorithm. Two bits alone lose 0.1175 of the squares of normal weights at
least, these 0.083. With the codes a, b, c, d, the newest last, a value is NEWEST[cd ^ ab] + MIDDLE[bc] - 62: both are
looked up in a register, and a free table of 256 values would lose as much.

Codes are uint8 [N, K/4]. Those of 32 columns of a row are 8 bytes. The walk is of columns 0, 4, ... 28, 1, 5, ... 31,
and ends where it began; a byte has four of its codes, the first in the lowest bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from . import lookup
from .int3 import _sum
from .int8 import ROUNDER

GROUP = 32
STATES, FOLLOWING = 64, 4
# By the older code and four times the newer one. Trained on normal weights by the generalized Lloyd algorithm.
NEWEST = (24, 50, 61, 37, 58, 0, 36, 21, 38, 47, 16, 75, 12, 26, 42, 54)
MIDDLE = (12, 20, 27, 0, 15, 52, 30, 26, 37, 31, 3, 42, 37, 18, 22, 10)
ZERO = 62
# Of a group's standard deviation, a step between values; a fitted one is up to a third more, which 255 are for.
STEP = 0.04413485
FACTOR = 0.0053
LARGEST_SCALE = 255
# Below this, a group's weights are taken for 0; a lower bound of the factor of a row of them.
SMALLEST, SMALLEST_FACTOR = 1e-30, 1e-36
_FORBIDDEN = 1e30


def pack(weight: Tensor, planes: tuple[Tensor, ...], importance: Tensor | None = None) -> None:
    """Packs `weight` [n, K], finite. Of the squares of errors the sum is small in which each weight counts by its own
    square and the mean square of its group, and by the `importance` [K] of its column."""
    codes, scales, factors = planes
    groups = weight.float().view(len(weight), -1, GROUP)
    unit = groups.abs().amax(2, keepdim=True)
    unit = unit.masked_fill(unit < SMALLEST, 1)
    numbers = groups / unit
    squares = numbers * numbers
    mean = _sum(squares) / GROUP
    weights = squares + torch.where(mean > 0, mean, 1)
    if importance is not None:
        weights = weights * importance.view(-1, GROUP)
    # Torch's root is not rounded correctly everywhere.
    step = torch.from_numpy(np.sqrt(mean.numpy())) * unit * STEP
    factor = (step.amax(1, keepdim=True) * FACTOR).clamp_(min=SMALLEST_FACTOR)
    factors.copy_(factor.view(-1))
    weights = _walk(weights)
    values, state = _begin(_walk(groups / (_scale(step, factor) * factor)), weights)
    weighted = weights * values
    whole = _sum(weighted * values)
    step = torch.where(whole > 0, _sum(weighted * _walk(numbers)) / whole * unit, step)
    scale = _scale(step, factor)
    scales.copy_(scale.squeeze(2))
    found = _close(_walk(groups / (scale * factor)), weights, state)
    codes.copy_((found.view(*found.shape[:-1], 8, 4) << torch.arange(0, 8, 2)).sum(-1).flatten(1))


def _scale(step: Tensor, factor: Tensor) -> Tensor:
    return (step / factor).add_(ROUNDER).sub_(ROUNDER).clamp_(1, LARGEST_SCALE)


def _walk(groups: Tensor) -> Tensor:
    """Columns [..., 32] in the order of the walk."""
    return groups.reshape(*groups.shape[:-1], 8, 4).transpose(-1, -2).flatten(-2)


@cache
def _values() -> Tensor:
    """By the oldest code and the state that is reached (the three newer ones): float32 [4, 64]."""
    a, b, c, d = torch.cartesian_prod(*[torch.arange(4)] * 4).unbind(1)
    newest, middle = torch.tensor(NEWEST), torch.tensor(MIDDLE)
    values = newest[(c + 4 * d) ^ (a + 4 * b)] + middle[b + 4 * c] - ZERO
    return values.float().view(FOLLOWING, STATES)


def _costs(numbers: Tensor, weights: Tensor, costs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The least cost [..., 64] of reaching every state by the steps of `numbers` [..., T], and the oldest code that
    each step forgets on the way there. It is in the lowest bits of a cost, so that ties have one winner."""
    oldest, forgotten = torch.arange(FOLLOWING, dtype=torch.int32)[:, None], []
    for number, weight in zip(numbers.unbind(-1), weights.unbind(-1), strict=True):
        apart = number[..., None, None] - _values()
        before = costs.view(*costs.shape[:-1], FOLLOWING, -1).repeat_interleave(FOLLOWING, -1)
        tried = (apart * apart * weight[..., None, None] + before).view(torch.int32) & ~3 | oldest
        costs = tried.view(torch.float32).amin(-2)
        forgotten.append(costs.view(torch.int32) & 3)
    return costs, forgotten


def _trace(state: Tensor, forgotten: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The states [..., T] that the steps reached, and the values there, where the last one reached `state` [..., 1]."""
    states, values = [], []
    for each in reversed(forgotten):
        code = each.gather(-1, state)
        values.append(_values().view(-1)[code.long() * STATES + state])
        states.append(state)
        state = code.long() * (STATES // FOLLOWING) + state // FOLLOWING
    return torch.cat(states[::-1], -1), torch.cat(values[::-1], -1)


def _begin(numbers: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Walks that begin in their middle, in any state: their values, and the states that come past the end."""
    half = GROUP // 2
    start = torch.zeros(*numbers.shape[:-1], STATES)
    costs, forgotten = _costs(numbers.roll(half, -1), weights.roll(half, -1), start)
    numbered = costs.view(torch.int32) & ~(STATES - 1) | torch.arange(STATES, dtype=torch.int32)
    states, values = _trace(numbered.amin(-1, keepdim=True).long() & (STATES - 1), forgotten)
    return values.roll(-half, -1), states[..., half - 1 : half]


def _close(numbers: Tensor, weights: Tensor, state: Tensor) -> Tensor:
    """The codes of walks that begin and end with `state`: uint8 [..., 32]."""
    costs = torch.full((*numbers.shape[:-1], STATES), _FORBIDDEN).scatter_(-1, state, 0)
    _, forgotten = _costs(numbers, weights, costs)
    return (_trace(state, forgotten)[0] % FOLLOWING).to(torch.uint8)


def numbers_of(codes: Tensor) -> Tensor:
    """The values of codes uint8 [n, K/4], float32 [n, K/32, 32]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    steps = (codes.unsqueeze(-1) >> shifts & 3).flatten(1).view(len(codes), -1, GROUP).long()
    a, b, c = (steps.roll(distance, -1) for distance in (3, 2, 1))
    values = _values().to(codes.device).view(-1)[((a * 4 + b) * 4 + c) * 4 + steps]
    return values.view(*values.shape[:-1], 4, 8).transpose(-1, -2).flatten(-2)


def unpack(planes: tuple[Tensor, ...], out: Tensor, wide: Tensor) -> None:
    """Writes the matrix into `out` [n, K], rounded once from float32."""
    codes, scales, factors = planes
    for rows in lookup.chunks_of(out):
        scale = scales[rows].float() * factors[rows].unsqueeze(1)
        out[rows].copy_((numbers_of(codes[rows]) * scale.unsqueeze(2)).flatten(1))
