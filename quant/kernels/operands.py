"""The operands of the grouped product, and the activations that it supports. Triton-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.nn.functional import gelu, silu

from ..tensor import PackedTensor
from .upload import upload

# The matrix, the first and the last + 1 row of each tile.
Tiles = Sequence[tuple[int, int, int]]
# Every tensor of a stack begins at a multiple of this number of bytes, which a GPU loads at once.
STEP_NBYTES = 16


class Stack(NamedTuple):
    """Tensors of one shape at any addresses on one device: the first, and the offset of each one from it.

    `shifts` is int64 [n] on the device, in units of STEP_NBYTES. The tensors of a stack may be in different arenas.
    """

    base: torch.Tensor
    shifts: torch.Tensor

    @classmethod
    def all_of(cls, runs: Sequence[Sequence[torch.Tensor]], tiles: Tiles = ()) -> tuple[list[Self], torch.Tensor]:
        """A stack for each sequence of tensors, all of equal length, and `tiles` as int32 [n, 3], with one copy to the
        device.

        Raises ValueError if a tensor does not begin at a multiple of STEP_NBYTES.
        """
        shifts = [_shifts(tensors) for tensors in runs]
        # Each row begins at a multiple of 16 bytes: Triton compiles a kernel separately for pointers that do not.
        padded = np.array([each + each[:1] * (len(each) % 2) for each in shifts], np.int64)
        numbers = np.concatenate([padded.view(np.int32).ravel(), np.array(tiles, np.int32).ravel()])
        both, end = upload(torch.from_numpy(numbers), runs[0][0].device), 2 * padded.size
        uploaded = both[:end].view(torch.int64).view(padded.shape)
        stacks = [cls(tensors[0], row[: len(tensors)]) for tensors, row in zip(runs, uploaded, strict=True)]
        return stacks, both[end:].view(-1, 3)


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


class ProductOperands(NamedTuple):
    """What one launch multiplies by: matrices [N, K] of one layout, and biases [N] for all of them or for none."""

    matrices: Sequence[PackedTensor]
    biases: Sequence[torch.Tensor | None]

    @property
    def given(self) -> list[torch.Tensor]:
        return [bias for bias in self.biases if bias is not None]

    @property
    def runs(self) -> list[Sequence[torch.Tensor]]:
        """The tensors of each plane, and the biases."""
        planes: list[Sequence[torch.Tensor]] = [*zip(*(matrix.planes for matrix in self.matrices), strict=True)]
        return [*planes, self.given] if self.given else planes

    def packed(self, stacks: Sequence[Stack]) -> Packed:
        """Of the stacks of `runs`."""
        names = [plane.name for plane in self.matrices[0].layout.planes]
        return Packed(**dict(zip([*names, "biases"], stacks, strict=False)))


class Gate(NamedTuple):
    """How a matrix of 2 I rows gives I outputs: an activation of pairs of rows, which are [gate; up] or alternate.

    `activation` is a name that `grouped.activate` knows.
    """

    activation: str
    alternating: bool = False


class Sizes(NamedTuple):
    """The constants that the kernel is compiled for: a matrix [num_rows, num_columns], its codes, and tile sizes.

    `codes` is the type of codes, `group` the columns that share a scale (0 if whole rows do, or there is none), and
    `block` those that share the factors of scales and zeros (0 without); `paired` are scales and zeros that lie beside
    each other, with a factor for each row. A program computes `rows` rows of x by
    `outputs` outputs, `depth` columns at a time, which share one scale.
    """

    codes: str
    group: int
    block: int
    paired: bool
    num_rows: int
    num_columns: int
    gate: Gate | None
    rows: int
    outputs: int
    depth: int
    dtype: Any

    @property
    def pairs(self) -> bool:
        """Whether even and odd columns are multiplied apart, as codes lie that are less than a byte."""
        return self.codes not in ("none", "int8")

    @property
    def parts(self) -> int:
        """The groups of columns in a step, each with scales of its own."""
        return max(1, self.depth // self.group) if self.group else 1


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=7)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-7, 7) + 1)


# The activations that `grouped.activate` computes, by name.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "silu": lambda gate, up: silu(gate) * up,
        "gelu_tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
        "clamped_swiglu": _clamped_swiglu,
    }
)


def recognise(activate: Callable[[torch.Tensor], torch.Tensor]) -> Gate | None:
    """The gate that computes the same as `activate` on rows [n, 2 I]; None if there is none.

    Compares results for random numbers that exceed every clamp, since a model's code does not name its activation.
    """
    probe = 24 * torch.rand(16, 64, generator=torch.Generator().manual_seed(0)) - 12
    try:
        result = activate(probe)
    except RuntimeError:
        # It has parameters on another device.
        return None
    for name, activation in ACTIVATIONS.items():
        for alternating in (False, True):
            gate, up = (probe[:, ::2], probe[:, 1::2]) if alternating else probe.chunk(2, 1)
            if result.shape == gate.shape and torch.allclose(result, activation(gate, up), rtol=1e-5, atol=1e-5):
                return Gate(name, alternating)
    return None
