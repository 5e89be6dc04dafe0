"""Scratch memory that products share; it is allocated once and cut into views. Knows no kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.format import ALIGNMENT, FormatError, Layout, end_of
from ..scratch import scratch_planes
from ..tensor import dtype_name, view


class Scratch(NamedTuple):
    """The scratch of one product: a strip [rows, K], its scales, a tile [TILE, K] and the tile's product."""

    weight: Tensor
    wide: Tensor
    x: Tensor
    y: Tensor


class Workspace:
    """One flat buffer on a device. Every product uses it from its start, so two threads need two workspaces."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        self.buffer = torch.empty(-(-nbytes // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=device)
        # Making the views takes longer than a small product, and a model has only a handful of matrix shapes.
        self._cuts: dict[tuple[str, tuple[int, int], str, torch.dtype, bool], Scratch] = {}

        self._rows: dict[torch.dtype, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    def rows(self, num_rows: int, like: Tensor) -> Tensor:
        """An uninitialized buffer [num_rows, D] like `like` [., D]; all calls return the same memory, which only grows.

        New memory would be mapped page by page every time, which takes longer than filling it.
        """
        numel = num_rows * like.shape[1]
        memory = self._rows.get(like.dtype)
        if memory is None or memory.numel() < numel:
            # A tensor that is allocated in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                memory = self._rows[like.dtype] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return memory[:numel].view(num_rows, like.shape[1])

    def cut(self, layout: Layout, dtype: torch.dtype, deterministic: bool) -> Scratch:
        """The views for a product of activations of `dtype` with such a matrix. Raises FormatError if too small."""
        key = (layout.format, layout.shape, layout.dtype, dtype, deterministic)
        if key not in self._cuts:
            self._cuts[key] = self._cut(layout, dtype_name(dtype), deterministic)
        return self._cuts[key]

    def _cut(self, layout: Layout, dtype: str, deterministic: bool) -> Scratch:
        planes = scratch_planes(layout, dtype, deterministic)
        if end_of(planes) > self.nbytes:
            raise FormatError(
                f"A workspace of {self.nbytes} bytes was found; a product of {dtype} rows with {layout.format}"
                f" {list(layout.shape)} wants {end_of(planes)}. Make it as large as the largest scratch_nbytes."
            )
        # A view that is made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return Scratch(*(view(self.buffer, plane) for plane in planes))
