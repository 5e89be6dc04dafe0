"""A kernel and all that it is called with: to run, or to compile for a GPU that is not there. Imports Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, num_warps=self.warps, num_stages=self.stages)

    def compile(self) -> Any:
        """Triton's compiled kernel for the active driver's target."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, num_warps=self.warps, num_stages=self.stages)


def dot_type(dtype: torch.dtype) -> Any:
    """What products of activations of `dtype` are computed in.

    Triton's interpreter works on the bit patterns of bfloat16 and is wrong; there it is float32.
    """
    return tl.float32 if triton.knobs.runtime.interpret else _TYPES[dtype]


def padded(count: int) -> int:
    """The next power of two: what Triton's tiles measure."""
    return 1 << (count - 1).bit_length()
