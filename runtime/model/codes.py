"""Codes of a matrix, and the floats that they mean: weight = (code - zero) * scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quant.native.blocks import look_up
from ..shape.quantization import WHOLE

# OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# How far exponents of e8m0 are shifted.
BIAS = 127
# What bytes of e4m3 mean; torch converts them one by one.
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [N, K]: `rows(begin, end)` are its codes [n, K], uint8, int8 or e4m3; `levels` has what those mean.

    `scale` is float32 [N / group rows, K / group columns], or [blocks] of the flattened matrix; `zero` likewise, or the
    same for all. `columns` [K] is the group of each column where groups are not runs of columns.
    """

    shape: tuple[int, int]
    rows: Callable[[int, int], Tensor]
    group: tuple[int, int]
    scale: Tensor
    zero: Tensor | int
    levels: Tensor | None = None
    columns: Tensor | None = None

    def widen(self, begin: int, end: int) -> Tensor:
        """Rows of the matrix in float32."""
        codes, levels = self.rows(begin, end), self.levels
        if codes.dtype == torch.float8_e4m3fn:
            codes, levels = codes.view(torch.uint8), _E4M3
        values = codes.float() if levels is None else look_up(codes, levels)
        groups = self._groups(values)
        if isinstance(self.zero, Tensor):
            groups -= self._spread(self.zero, begin, end)
        elif self.zero:
            groups -= self.zero
        groups.mul_(self._spread(self.scale, begin, end))
        return values

    def _groups(self, values: Tensor) -> Tensor:
        """Values [n, K] as [n, groups, columns of a group], where all rows consist of whole runs of columns."""
        return values.view(len(values), -1, self.group[1]) if self._runs else values

    @property
    def _runs(self) -> bool:
        columns = self.group[1]
        return self.scale.dim() > 1 and self.columns is None and columns > 1 and self.shape[1] % columns == 0

    def _spread(self, grid: Tensor, begin: int, end: int) -> Tensor:
        """The number of each weight's group, of a shape that broadcasts to that of `_groups`."""
        num_columns, (rows, columns) = self.shape[1], self.group
        if grid.dim() == 1:
            index = torch.arange(begin * num_columns, end * num_columns) // columns
            return grid[index].view(-1, num_columns)
        if rows != WHOLE:
            grid = grid[begin:end] if rows == 1 else grid[torch.arange(begin, end) // rows]
        if self._runs:
            return grid[:, :, None]
        if self.columns is not None:
            return grid[:, self.columns]
        return grid if columns in (WHOLE, 1) else grid.repeat_interleave(columns, 1)[:, :num_columns]
