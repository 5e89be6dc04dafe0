"""A kernel with its arguments, which can be run, or compiled for a GPU that is not present. Imports Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Launch(NamedTuple):
    """A kernel, its grid, its arguments, and its numbers of warps and pipeline stages."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        """Launches the kernel on the current stream."""
        self.kernel[self.grid](*self.arguments, num_warps=self.warps, num_stages=self.stages)

    def compile(self) -> Any:
        """Compiles the kernel for the active driver's target and returns Triton's compiled kernel."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, num_warps=self.warps, num_stages=self.stages)


def dot_type(dtype: torch.dtype) -> Any:
    """The Triton dtype of the operands of products with activations of `dtype`.

    It is float32 in Triton's interpreter, which computes wrongly on the bit patterns of bfloat16.
    """
    return tl.float32 if triton.knobs.runtime.interpret else _TYPES[dtype]


def padded(count: int) -> int:
    """`count` rounded up to a power of two, which Triton requires of tile sizes."""
    return 1 << (count - 1).bit_length()
