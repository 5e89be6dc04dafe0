"""Rows grouped by matrix times packed matrices, in one launch. Imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from ..formats.nf4 import LEVELS
from ..tensor import PackedTensor
from .grouped import grouped_product
from .launch import Launch, dot_type
from .operands import Gate, Packed, Sizes, Stack
from .tuning import FORMATS, tile_rows, tiles_for
from .upload import upload


class Rows(NamedTuple):
    """Which rows of the output belong to which matrix: tiles int32 [n, 3] of (matrix, first row, last row + 1), none of
    more than `height` rows.
    """

    tiles: torch.Tensor
    height: int

    @classmethod
    def of(cls, spans: Sequence[slice], x: torch.Tensor, steady: bool = False) -> Rows:
        """Matrix i owns the rows spans[i] of activations like x; `steady` cuts them alike however many there are."""
        mean = 1 if steady else sum(span.stop - span.start for span in spans) / len(spans)
        height = tile_rows(mean, wide=x.dtype == torch.float32)
        tiles = [
            (matrix, first, min(first + height, span.stop))
            for matrix, span in enumerate(spans)
            for first in range(span.start, span.stop, height)
        ]
        return cls(upload(torch.tensor(tiles, dtype=torch.int32), x.device), height)


class GroupedProduct:
    """The kernel with the table of nf4's levels, on one device; `steady` makes a row's bits depend on it alone."""

    def __init__(self, device: torch.device | str, steady: bool = False) -> None:
        self.levels = torch.tensor(LEVELS, device=device)
        self.steady = steady

    def rows(self, spans: Sequence[slice], x: torch.Tensor) -> Rows:
        """For launches in which matrix i makes the rows spans[i] of the output from activations like x."""
        return Rows.of(spans, x, self.steady)

    def takes(self, matrices: Sequence[PackedTensor]) -> bool:
        """Whether there is a kernel for them: matrices of one layout, in a format that it reads, with rows in multiples
        of 8, since biases that lie side by side have to begin at multiples of STEP_NBYTES.
        """
        layout = matrices[0].layout
        known = layout.format in FORMATS and layout.shape[0] % 8 == 0
        return known and all(matrix.layout == layout for matrix in matrices)

    def launch(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        matrices: Sequence[PackedTensor],
        biases: Sequence[torch.Tensor | None],
        rows: Rows,
        token_ids: torch.Tensor | None = None,
        gate: Gate | None = None,
    ) -> Launch:
        """out[p] = x[token_ids[p]] (x[p] without token_ids) times the matrix that owns row p, activated by `gate`.

        x [T, K], token_ids int64 [P], out [P, N] or [P, N/2] with a gate; matrices [N, K] of one layout; biases [N],
        all or none.
        """
        layout = matrices[0].layout
        planes = list(zip(*(matrix.planes for matrix in matrices), strict=True))
        given = [bias for bias in biases if bias is not None]
        stacks = Stack.all_of([*planes, given] if given else planes)
        packed = Packed(stacks[0], stacks[1] if len(planes) > 1 else None, stacks[-1] if given else None)
        cut = tiles_for(rows.height, layout.format, wide=x.dtype == torch.float32)
        num_rows, num_columns = layout.shape
        sizes = Sizes(layout.format, num_rows, num_columns, gate, cut.rows, cut.outputs, cut.depth, dot_type(x.dtype))
        grid = (len(rows.tiles), triton.cdiv(out.shape[1], cut.outputs))
        arguments = (x.contiguous(), token_ids, out, packed, self.levels, rows.tiles, sizes)
        return Launch(grouped_product, grid, arguments, cut.warps, cut.stages)
