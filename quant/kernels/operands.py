"""What the grouped product is given. Free of Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .upload import upload

# Every tensor of a stack begins at a multiple of so many bytes: what a GPU loads at once.
STEP_NBYTES = 16


class Stack(NamedTuple):
    """Tensors of one shape that lie anywhere on one device: the first, and how far from it each one begins.

    `shifts` is int64 [n] on the device, in steps of STEP_NBYTES. A stack can name experts in an arena, in a ring and in
    both.
    """

    base: torch.Tensor
    shifts: torch.Tensor

    @classmethod
    def all_of(cls, runs: Sequence[Sequence[torch.Tensor]]) -> list[Stack]:
        """A stack for each run, runs of equal length, in one copy to the device. Raises ValueError for tensors that a
        stack cannot name.
        """
        shifts = [_shifts(tensors) for tensors in runs]
        # Each begins at a multiple of 16 bytes: kernels are compiled once for pointers that do, once for others.
        padded = torch.tensor([each + each[:1] * (len(each) % 2) for each in shifts])
        placed = upload(padded, runs[0][0].device)
        return [cls(tensors[0], row[: len(tensors)]) for tensors, row in zip(runs, placed, strict=True)]


def _shifts(tensors: Sequence[torch.Tensor]) -> list[int]:
    first = tensors[0]
    apart = [tensor.data_ptr() - first.data_ptr() for tensor in tensors]
    if first.data_ptr() % STEP_NBYTES or any(nbytes % STEP_NBYTES for nbytes in apart):
        raise ValueError(
            f"Tensors {apart} bytes from address {first.data_ptr():#x} were found; all have to begin at multiples of"
            f" {STEP_NBYTES} bytes. Pack them with quant.tensor, or multiply by them one by one."
        )
    return [nbytes // STEP_NBYTES for nbytes in apart]


class Packed(NamedTuple):
    """Matrices [N, K] of one layout: codes, their factors (nf4: absmax, int8: scales) and biases [N], or None."""

    codes: Stack
    factors: Stack | None
    biases: Stack | None


class Gate(NamedTuple):
    """How a matrix of 2 I rows makes I outputs: two of its rows, [gate; up] or alternating, and an activation of both.

    `activation` is a name that `activation.activate` knows.
    """

    activation: str
    alternating: bool = False


class Sizes(NamedTuple):
    """What the kernel is compiled for: a matrix [num_rows, num_columns] of `format`, cut into tiles.

    A program computes `rows` rows of x by `outputs` outputs, `depth` columns at a time; nf4 wants 64 of them, one
    absmax.
    """

    format: str
    num_rows: int
    num_columns: int
    gate: Gate | None
    rows: int
    outputs: int
    depth: int
    dtype: Any
