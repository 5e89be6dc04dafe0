"""Which matrices in order `rows` the library's kernels read where they lie. Torch-free: plans ask it, too."""

from __future__ import annotations

from ..formats.format import ROWS, TILE_COLUMNS, Layout
from ..native import library
from ..native.library import CONSTANTS, ENUMS


def readable(up: Layout, down: Layout) -> bool:
    """Whether there are kernels for experts of such matrices, gate and up fused."""
    return up.shape[0] == 2 * down.shape[1] and all(map(_is_readable, (up, down)))


def reads_floats() -> bool:
    """Whether rows in bfloat16 are multiplied by matrices of bfloat16 as those in order `tiles` are.

    Where a processor has AVX-512, oneDNN's products are the faster ones.
    """
    return library.available() and library.loaded().isa == "avx2"


def takes_floats(layout: Layout) -> bool:
    """Whether this is such a matrix, and one of whole tiles."""
    if layout.codes != "none" or layout.dtype != "bfloat16" or not reads_floats():
        return False
    return not any(size % TILE_COLUMNS for size in layout.shape)


def _is_readable(layout: Layout) -> bool:
    known = layout.codes == "none" or layout.codes in ENUMS["codes"]
    whole = layout.shape[1] % TILE_COLUMNS == 0 == layout.group % TILE_COLUMNS
    few = layout.shape[1] // layout.group <= CONSTANTS["row_groups"]
    return layout.order == ROWS and known and layout.codes not in ("int3", "vq2") and whole and few and not layout.block
