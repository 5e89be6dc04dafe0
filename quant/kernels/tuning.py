"""Tile sizes of the grouped product by format and number of rows; they are constants, so a job does not autotune.

They were chosen by what they compile to, for GPUs of every kind (docs/dev/kernels.md), and by their times on an H200,
the only one that has timed them; `python -m bench.kernels` times them on others. Triton-free.
"""

from __future__ import annotations

from importlib import import_module
from typing import NamedTuple

from ..formats.format import EXPERT_FORMATS, JOINED_COLUMNS, QUANT_FORMATS, Layout
from .gpu import INTERPRETER, interpreted


class Tiles(NamedTuple):
    """A program computes `rows` by `outputs`, `depth` columns at a time, with `warps` and pipeline `stages`."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


TILE_ROWS = (16, 32, 64)
# Tiles by type of codes and by rows: few rows are memory-bound, many are compute-bound. With more stages, an SM of 100
# KiB of shared memory (8.6, 8.9, 12.0) would have room for only a few warps. Warps beyond four divide the outputs: each
# unpacks codes that no other does.
_TILES = {
    "none": {16: Tiles(16, 64, 64, 4, 2), 32: Tiles(32, 64, 64, 8, 2), 64: Tiles(64, 64, 64, 8, 2)},
    "int8": {16: Tiles(16, 64, 128, 4, 2), 32: Tiles(32, 64, 64, 4, 2), 64: Tiles(64, 128, 64, 8, 2)},
    "int4": {16: Tiles(16, 128, 128, 4, 2), 32: Tiles(32, 64, 64, 4, 2), 64: Tiles(64, 128, 64, 8, 2)},
    "e2m1": {16: Tiles(16, 128, 128, 4, 2), 32: Tiles(32, 64, 64, 4, 2), 64: Tiles(64, 128, 64, 8, 2)},
    "nf4": {16: Tiles(16, 64, 128, 4, 3), 32: Tiles(32, 64, 64, 4, 2), 64: Tiles(64, 128, 64, 8, 2)},
    "int3": {16: Tiles(16, 128, 128, 4, 2), 32: Tiles(32, 64, 128, 4, 2), 64: Tiles(64, 128, 128, 8, 2)},
    "vq2": {16: Tiles(16, 128, 128, 4, 2), 32: Tiles(32, 64, 128, 4, 2), 64: Tiles(64, 128, 128, 8, 2)},
}
# Hopper has twice the shared memory, and tensor cores that read codes which four warps have unpacked together.
_HOPPER = (9, 0)
_HOPPER_TILES = {
    codes: {**tiles, 16: tiles[16]._replace(stages=3) if codes == "int8" else tiles[16], 64: Tiles(64, 128, 64, 4, 3)}
    for codes, tiles in _TILES.items()
    if codes != "none"
} | {"none": _TILES["none"]}
# Tensor cores would lose bits of float32: products are multiply-adds, whose sums fit into registers with small tiles.
_WIDE = Tiles(16, 32, 64, 4, 1)
# Where half of the multiprocessors have no program, the others have one, and wait for each instruction and each load:
# programs then have half the outputs, and more columns are on their way. Sums keep their order, and so their bits.
_LONE_STAGES = 4
# Below sm80 tl.dot is a loop of multiply-adds: on such GPUs, whole matrices are dequantized instead.
DOT_CAPABILITY = (8, 0)
# Beyond so many rows a device dequantizes a single matrix first: torch's product then gains more than that takes, from
# 300 rows on (H200: 1.1 ps a weight, 3.6 fs a row) to 850 (RTX 4060, by its data sheet).
GROUPED_ROWS = 512
# The formats that the kernel supports: all of `--quant` and `--experts`.
FORMATS = (*QUANT_FORMATS, *EXPERT_FORMATS)


def supports(capability: tuple[int, int]) -> bool:
    """Whether the kernel is used on GPUs of this compute capability."""
    return capability >= DOT_CAPABILITY


def capability_of() -> tuple[int, int]:
    """The compute capability of the GPU that Triton compiles for."""
    if interpreted():
        return INTERPRETER.capability
    arch: int = import_module("triton.runtime.driver").driver.active.get_current_target().arch
    return divmod(arch, 10)


def tile_rows(mean_rows: float, wide: bool) -> int:
    """The rows of a tile for groups of `mean_rows` rows on average; `wide` means float32 activations."""
    if wide:
        return _WIDE.rows
    return next((rows for rows in TILE_ROWS if mean_rows <= rows), TILE_ROWS[-1])


def tiles_for(rows: int, layout: Layout, wide: bool, capability: tuple[int, int], processors: int = 0) -> Tiles:
    """The tile sizes for tiles of `rows`, one of TILE_ROWS, and matrices of a layout; `processors` are those of a GPU
    that one matrix has to itself, 0 where several share it."""
    if wide:
        tiles = _WIDE
    else:
        tiles = (_HOPPER_TILES if capability == _HOPPER else _TILES)[layout.codes][rows]
        if rows == TILE_ROWS[0] and 2 * layout.shape[0] <= processors * tiles.outputs:
            tiles = tiles._replace(outputs=tiles.outputs // 2, stages=_LONE_STAGES)
    if layout.codes in EXPERT_FORMATS:
        # Steps read codes that lie together.
        tiles = tiles._replace(depth=JOINED_COLUMNS)
    if not layout.grouped:
        return tiles
    # Steps of columns with scales of their own are whole, down to the smallest group.
    columns, depth = layout.shape[1], tiles.depth
    while columns % depth:
        depth //= 2
    return tiles._replace(depth=depth)
