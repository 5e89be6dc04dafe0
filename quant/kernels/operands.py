"""The operands of the grouped product. Triton-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .upload import upload

# Every tensor of a stack begins at a multiple of this number of bytes, which a GPU loads at once.
STEP_NBYTES = 16


class Stack(NamedTuple):
    """Tensors of one shape at any addresses on one device: the first, and the offset of each one from it.

    `shifts` is int64 [n] on the device, in units of STEP_NBYTES. The tensors of a stack may be in different arenas.
    """

    base: torch.Tensor
    shifts: torch.Tensor

    @classmethod
    def all_of(cls, runs: Sequence[Sequence[torch.Tensor]]) -> list[Stack]:
        """A stack for each sequence of tensors, all of equal length, with one copy to the device.

        Raises ValueError if a tensor does not begin at a multiple of STEP_NBYTES.
        """
        shifts = [_shifts(tensors) for tensors in runs]
        # Each row begins at a multiple of 16 bytes: Triton compiles a kernel separately for pointers that do not.
        padded = torch.tensor([each + each[:1] * (len(each) % 2) for each in shifts])
        uploaded = upload(padded, runs[0][0].device)
        return [cls(tensors[0], row[: len(tensors)]) for tensors, row in zip(runs, uploaded, strict=True)]


def _shifts(tensors: Sequence[torch.Tensor]) -> list[int]:
    first = tensors[0]
    apart = [tensor.data_ptr() - first.data_ptr() for tensor in tensors]
    if first.data_ptr() % STEP_NBYTES or any(nbytes % STEP_NBYTES for nbytes in apart):
        raise ValueError(
            f"Tensors {apart} bytes from address {first.data_ptr():#x} were found; all must begin at multiples of"
            f" {STEP_NBYTES} bytes. Pack them with quant.tensor, or multiply by them one by one."
        )
    return [nbytes // STEP_NBYTES for nbytes in apart]


class Packed(NamedTuple):
    """The planes of matrices [N, K] of one layout (formats.format) and biases [N]; None for those that they lack."""

    codes: Stack
    scales: Stack | None = None
    zeros: Stack | None = None
    factors: Stack | None = None
    biases: Stack | None = None


class Gate(NamedTuple):
    """How a matrix of 2 I rows gives I outputs: an activation of pairs of rows, which are [gate; up] or alternate.

    `activation` is a name that `activation.activate` knows.
    """

    activation: str
    alternating: bool = False


class Sizes(NamedTuple):
    """The constants that the kernel is compiled for: a matrix [num_rows, num_columns], its codes, and tile sizes.

    `codes` is the type of codes, `group` the columns that share a scale (0 if whole rows do, or there is none), and
    `block` those that share the factors of scales and zeros (0 without). A program computes `rows` rows of x by
    `outputs` outputs, `depth` columns at a time, which share one scale.
    """

    codes: str
    group: int
    block: int
    num_rows: int
    num_columns: int
    gate: Gate | None
    rows: int
    outputs: int
    depth: int
    dtype: Any
