"""4-bit codes, row after row, as indices into 16 values: both codes of a byte are looked up at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .format import row_chunks

# On other devices an operation costs a launch, and copies are memory that no plan counts.
DEVICE_CHUNK = 1 << 20


class Values(NamedTuple):
    """The 16 values of codes, and whether the first of two codes is in the high bits of its byte."""

    numbers: tuple[float, ...]
    high_first: bool = False


def unpack(codes: Tensor, values: Values, scale: Tensor, out: Tensor, zero: Tensor | None = None) -> None:
    """Writes value(code) * scale + zero, computed in float32, into `out` [n, K].

    `codes` are uint8 [n, K/2], scale and zero float32 [n, K/group].
    """
    table = _pairs(values, out.device)
    for rows in chunks_of(out):
        levels = table.index_select(0, codes[rows].int().view(-1)).view(torch.float32)
        groups = levels.view(*scale[rows].shape, -1)
        factors = scale[rows].unsqueeze(2)
        if not out.is_cpu:
            if zero is None:
                torch.mul(groups, factors, out=out[rows].view_as(groups))
            else:
                torch.addcmul(zero[rows].unsqueeze(2), groups, factors, out=out[rows].view_as(groups))
            continue
        # A number for each weight: on a CPU, multiplying by one number a group would start a loop for every group.
        groups.mul_(factors.expand_as(groups).contiguous())
        if zero is not None:
            groups.add_(zero[rows].unsqueeze(2).expand_as(groups).contiguous())
        out[rows].copy_(levels.view(-1, out.shape[1]))


@cache
def _pairs(values: Values, device: torch.device) -> Tensor:
    """For every byte of codes both values, float32, as the bits of one int64 [256]."""
    numbers = torch.tensor(values.numbers, device=device)
    high, low = torch.cartesian_prod(numbers, numbers).unbind(1)
    both = (high, low) if values.high_first else (low, high)
    return torch.stack(both, 1).view(torch.int64).view(-1)


def chunks_of(matrix: Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix [N, K] that are dequantized together, with a few float32 copies of each."""
    if matrix.is_cpu:
        return row_chunks((len(matrix), matrix.shape[1]))
    rows = max(1, DEVICE_CHUNK // matrix.shape[1])
    return (slice(start, start + rows) for start in range(0, len(matrix), rows))
