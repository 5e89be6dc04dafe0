"""The grouped product: rows that are grouped by matrix, times packed matrices, in one launch. Imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from ..formats.format import ROWS
from ..formats.nf4 import LEVELS
from ..tensor import PackedTensor
from .grouped import grouped_product
from .launch import Launch, dot_type
from .operands import Gate, Packed, Sizes, Stack
from .tuning import tile_rows, tiles_for
from .upload import upload


class RowTiles(NamedTuple):
    """Which rows of the output belong to which matrix.

    `tiles` is int32 [n, 3] of (matrix, first row, last row + 1), each of at most `height` rows.
    """

    tiles: torch.Tensor
    height: int

    @classmethod
    def of(cls, spans: Sequence[slice], x: torch.Tensor, deterministic: bool = False) -> RowTiles:
        """Matrix i has the rows spans[i] of activations like x; if `deterministic`, `height` is independent of them."""
        mean = 1 if deterministic else sum(span.stop - span.start for span in spans) / len(spans)
        height = tile_rows(mean, wide=x.dtype == torch.float32)
        tiles = [
            (matrix, first, min(first + height, span.stop))
            for matrix, span in enumerate(spans)
            for first in range(span.start, span.stop, height)
        ]
        return cls(upload(torch.tensor(tiles, dtype=torch.int32), x.device), height)


class GroupedProduct:
    """Launches the kernel on one device, where it keeps the table of nf4's levels.

    `deterministic` makes the bits of a row depend on that row alone.
    """

    def __init__(self, device: torch.device | str, deterministic: bool = False) -> None:
        self.levels = torch.tensor(LEVELS, device=device)
        self.deterministic = deterministic

    def rows(self, spans: Sequence[slice], x: torch.Tensor) -> RowTiles:
        """The rows for launches in which matrix i computes the rows spans[i] of the output from activations like x."""
        return RowTiles.of(spans, x, self.deterministic)

    def takes(self, matrices: Sequence[PackedTensor]) -> bool:
        """Whether the kernel supports them: matrices of one layout, row after row, with N a multiple of 8.

        The last is needed because adjacent biases must begin at multiples of STEP_NBYTES.
        """
        layout = matrices[0].layout
        known = layout.order == ROWS and layout.shape[0] % 8 == 0
        return known and all(matrix.layout == layout for matrix in matrices)

    def launch(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        matrices: Sequence[PackedTensor],
        biases: Sequence[torch.Tensor | None],
        rows: RowTiles,
        token_ids: torch.Tensor | None = None,
        gate: Gate | None = None,
    ) -> Launch:
        """out[p] = x[token_ids[p]] (x[p] without token_ids) times the matrix of row p, activated by `gate`.

        x [T, K], token_ids int64 [P], out [P, N], or [P, N/2] with a gate; matrices [N, K] of one layout; biases [N],
        for all matrices or for none.
        """
        layout = matrices[0].layout
        planes = list(zip(*(matrix.planes for matrix in matrices), strict=True))
        given = [bias for bias in biases if bias is not None]
        stacks = Stack.all_of([*planes, given] if given else planes)
        packed = Packed(*stacks[: len(planes)])._replace(biases=stacks[-1] if given else None)
        cut = tiles_for(rows.height, layout, wide=x.dtype == torch.float32)
        grouping = layout.codes, layout.group if layout.grouped else 0, layout.block
        sizes = Sizes(*grouping, *layout.shape, gate, cut.rows, cut.outputs, cut.depth, dot_type(x.dtype))
        grid = (len(rows.tiles), triton.cdiv(out.shape[1], cut.outputs))
        arguments = (x.contiguous(), token_ids, out, packed, self.levels, rows.tiles, sizes)
        return Launch(grouped_product, grid, arguments, cut.warps, cut.stages)
