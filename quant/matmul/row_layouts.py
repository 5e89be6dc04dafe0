"""Which matrices in order `rows` the library's kernels for experts on a CPU read. Torch-free: plans ask it, too."""

from __future__ import annotations

from ..formats.format import ROWS, TILE_COLUMNS, Layout
from ..native.library import CONSTANTS, ENUMS


def readable(up: Layout, down: Layout) -> bool:
    """Whether there are kernels for experts of such matrices, gate and up fused."""
    return up.shape[0] == 2 * down.shape[1] and all(map(_is_readable, (up, down)))


def _is_readable(layout: Layout) -> bool:
    known = layout.codes == "none" or layout.codes in ENUMS["codes"]
    whole = layout.shape[1] % TILE_COLUMNS == 0 == layout.group % TILE_COLUMNS
    few = layout.shape[1] // layout.group <= CONSTANTS["row_groups"]
    return layout.order == ROWS and known and layout.codes not in ("int3", "vq2") and whole and few and not layout.block
