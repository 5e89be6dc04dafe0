"""Tile sizes of the grouped product by GPU and format, frozen: nothing is searched while a job starts.

Chosen by what compiles without spills (docs/kernels.md), not by time: no GPU has timed them yet, and
`python -m bench.kernels` is how one would. Free of Triton.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """A program computes `rows` by `outputs`, `depth` columns at a time; `warps` and `stages` of its loads."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


TILE_ROWS = (16, 32, 64)
# By format and rows of a tile: few rows wait for codes, many for the tensor cores. Shared memory for more stages would
# leave an SM too few warps. nf4's absmax covers 64 columns; with stages its every weight, looked up in the table of
# levels, would go through shared memory by itself.
_TILES = {
    "none": {16: Tiles(16, 64, 64, 4, 2), 32: Tiles(32, 64, 64, 8, 2), 64: Tiles(64, 64, 64, 8, 2)},
    "int8": {16: Tiles(16, 64, 64, 4, 3), 32: Tiles(32, 64, 64, 4, 3), 64: Tiles(64, 64, 64, 8, 2)},
    "nf4": {16: Tiles(16, 64, 64, 8, 1), 32: Tiles(32, 64, 64, 8, 1), 64: Tiles(64, 32, 64, 4, 1)},
}
# float32 has no tensor cores without losing bits: products are multiply-adds, which small tiles keep in registers.
_WIDE = Tiles(16, 32, 64, 4, 1)
# Below sm80 tl.dot is a loop of multiply-adds: such GPUs widen whole matrices instead.
DOT_CAPABILITY = (8, 0)
# Weight formats that the kernel reads.
FORMATS = tuple(_TILES)


def supports(capability: tuple[int, int]) -> bool:
    return capability >= DOT_CAPABILITY


def tile_rows(mean_rows: float, wide: bool) -> int:
    """Rows of a tile for groups of so many rows on average; `wide` are float32 models."""
    if wide:
        return _WIDE.rows
    return next((rows for rows in TILE_ROWS if mean_rows <= rows), TILE_ROWS[-1])


def tiles_for(rows: int, format_name: str, wide: bool) -> Tiles:
    """For tiles of one of TILE_ROWS, by the format of the matrices."""
    return _WIDE if wide else _TILES[format_name][rows]
