"""Tile sizes of the grouped product by format and number of rows; they are constants, so a job does not autotune.

They were chosen because they compile without register spills (docs/dev/kernels.md), not by timing: only an
H100 has timed them so far; `python -m bench.kernels` does. Triton-free.
"""

from __future__ import annotations

from typing import NamedTuple

from ..formats.format import QUANT_FORMATS, ROWS, Layout, get_format


class Tiles(NamedTuple):
    """A program computes `rows` by `outputs`, `depth` columns at a time, with `warps` and pipeline `stages`."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


TILE_ROWS = (16, 32, 64)
# Tiles by kind of weights (those of nf4 are for all that have scales per group) and by rows: few rows are memory-bound,
# many are compute-bound. With more stages, an SM would have shared memory for only a few warps. The columns of a step
# share one scale: 64 at most with groups. With several stages, each of nf4's weights, looked up in the table of levels,
# would pass through shared memory separately.
_TILES = {
    "none": {16: Tiles(16, 64, 64, 4, 2), 32: Tiles(32, 64, 64, 8, 2), 64: Tiles(64, 64, 64, 8, 2)},
    "int8": {16: Tiles(16, 64, 64, 4, 3), 32: Tiles(32, 64, 64, 4, 3), 64: Tiles(64, 64, 64, 8, 2)},
    "nf4": {16: Tiles(16, 64, 64, 8, 1), 32: Tiles(32, 64, 64, 8, 1), 64: Tiles(64, 32, 64, 4, 1)},
}
# Tensor cores would lose bits of float32: products are multiply-adds, whose sums fit into registers with small tiles.
_WIDE = Tiles(16, 32, 64, 4, 1)
# Below sm80 tl.dot is a loop of multiply-adds: on such GPUs, whole matrices are dequantized instead.
DOT_CAPABILITY = (8, 0)
# The formats of `--quant` that the kernel supports: it reads codes row after row.
FORMATS = tuple(name for name, each in QUANT_FORMATS.items() if each.order == ROWS)


def supports(capability: tuple[int, int]) -> bool:
    """Whether the kernel is used on GPUs of this compute capability."""
    return capability >= DOT_CAPABILITY


def tile_rows(mean_rows: float, wide: bool) -> int:
    """The rows of a tile for groups of `mean_rows` rows on average; `wide` means float32 activations."""
    if wide:
        return _WIDE.rows
    return next((rows for rows in TILE_ROWS if mean_rows <= rows), TILE_ROWS[-1])


def reads(format_name: str) -> bool:
    """Whether the kernel supports matrices in a format as it is stored."""
    return get_format(format_name).order == ROWS


def tiles_for(rows: int, layout: Layout, wide: bool) -> Tiles:
    """The tile sizes for tiles of `rows`, one of TILE_ROWS, and matrices of a layout."""
    kind = "nf4" if layout.grouped else layout.codes
    tiles = _WIDE if wide else _TILES[kind][rows]
    if not layout.grouped or layout.group >= tiles.depth:
        return tiles
    # As many warps fewer, so that each thread still loads 8 bytes of codes at once.
    return tiles._replace(depth=layout.group, warps=tiles.warps * layout.group // tiles.depth)
