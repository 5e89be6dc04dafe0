"""What grouped products are launched with: GPUs and their kernel families, tile sizes, operands. Triton-free.

Tile sizes were chosen because they compile without register spills (docs/dev/kernels.md), not by timing: only an H100
has timed them so far; `python -m bench.kernels` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import gelu, silu

from ..formats.format import QUANT_FORMATS, ROWS, Layout, get_format
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

    `activation` is a name that `grouped.activate` knows.
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


# The oldest compute capability that Triton compiles for.
OLDEST_CAPABILITY = (7, 5)
# The oldest compute capability with bfloat16 tensor cores; older ones support float16 only.
BF16_CAPABILITY = (8, 0)


class Lacks(NamedTuple):
    """Why the kernels of each family cannot run, "" if they can.

    The families are attention over the KV cache, storing keys and values in it (`cache`), and grouped products of
    experts. torch computes a family whose kernels cannot run; the kernels of the others are used.
    """

    attention: str = ""
    cache: str = ""
    experts: str = ""

    @classmethod
    def everything(cls, reason: str) -> Lacks:
        """No family can run, for one reason."""
        return cls(reason, reason, reason)

    @property
    def reasons(self) -> dict[str, str]:
        """The reasons by family, for families that cannot run."""
        return {family: reason for family, reason in self._asdict().items() if reason}


class Gpu(NamedTuple):
    """A GPU: its compute capability such as (8, 6), or (0, 0) if unknown, and its number of multiprocessors."""

    capability: tuple[int, int]
    processors: int
    lacks: Lacks = Lacks()

    @property
    def computes_bf16(self) -> bool:
        """Whether bfloat16 is as fast as float16; assumed to be if the capability is unknown."""
        return self.capability == (0, 0) or self.capability >= BF16_CAPABILITY


# The GPU that kernels are tuned for in Triton's interpreter, which runs one program at a time.
INTERPRETER = Gpu((8, 0), 1)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors in host memory: for tests, a thousand times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


def triton_lack(capability: tuple[int, int]) -> str:
    """Why no Triton kernel can run, before any is tried; "" if they may run."""
    if capability < OLDEST_CAPABILITY:
        least, found = dotted(OLDEST_CAPABILITY), dotted(capability)
        return f"Triton compiles for compute capability {least} and newer, this GPU has {found}"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return ""


def lack_of(selftest: Callable[[], str]) -> str:
    """Why the kernels that `selftest` runs cannot be used; "" if they can.

    `selftest` returns the name of a launch that computed wrong numbers, or "", and raises what a launch raises.
    """
    try:
        wrong = selftest()
    except Exception as error:
        # There are many kinds: no compiler, no headers, a driver or a GPU that this Triton does not know, a kernel that
        # this Triton does not compile or that needs more shared memory than this GPU has.
        return f"Triton's kernels do not run here: {_brief(error)}"
    return wrong and f"Triton's kernels give wrong numbers here: {wrong}"


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as text, such as 8.6."""
    return ".".join(map(str, capability))


def _brief(error: BaseException) -> str:
    """The type and first line of an error, or of its cause if Triton's compiler quotes the kernel around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = str(getattr(error, "error_message", None) or error).strip().splitlines()
    text = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


class Tiles(NamedTuple):
    """A program computes `rows` by `outputs`, `depth` columns at a time, with `warps` and pipeline `stages`."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


TILE_ROWS = (16, 32, 64)
# Tiles by kind of weights (those of nf4 are for all that have scales per group) and by rows: few rows are memory-bound,
# many are compute-bound. With more stages, an SM would have shared memory for only a few warps. The columns of a step
# share one scale: 64 at most with groups. With several stages, each of nf4's weights, looked up in the table of levels,
# would pass through shared memory separately.
_TILES = {
    "none": {16: Tiles(16, 64, 64, 4, 2), 32: Tiles(32, 64, 64, 8, 2), 64: Tiles(64, 64, 64, 8, 2)},
    "int8": {16: Tiles(16, 64, 64, 4, 3), 32: Tiles(32, 64, 64, 4, 3), 64: Tiles(64, 64, 64, 8, 2)},
    "nf4": {16: Tiles(16, 64, 64, 8, 1), 32: Tiles(32, 64, 64, 8, 1), 64: Tiles(64, 32, 64, 4, 1)},
}
# Tensor cores would lose bits of float32: products are multiply-adds, whose sums fit into registers with small tiles.
_WIDE = Tiles(16, 32, 64, 4, 1)
# Below sm80 tl.dot is a loop of multiply-adds: on such GPUs, whole matrices are dequantized instead.
DOT_CAPABILITY = (8, 0)
# The formats of `--quant` that the kernel supports: it reads codes row after row.
FORMATS = tuple(name for name, each in QUANT_FORMATS.items() if each.order == ROWS)


def supports(capability: tuple[int, int]) -> bool:
    """Whether the kernel is used on GPUs of this compute capability."""
    return capability >= DOT_CAPABILITY


def tile_rows(mean_rows: float, wide: bool) -> int:
    """The rows of a tile for groups of `mean_rows` rows on average; `wide` means float32 activations."""
    if wide:
        return _WIDE.rows
    return next((rows for rows in TILE_ROWS if mean_rows <= rows), TILE_ROWS[-1])


def reads(format_name: str) -> bool:
    """Whether the kernel supports matrices in a format as it is stored."""
    return get_format(format_name).order == ROWS


def tiles_for(rows: int, layout: Layout, wide: bool) -> Tiles:
    """The tile sizes for tiles of `rows`, one of TILE_ROWS, and matrices of a layout."""
    kind = "nf4" if layout.grouped else layout.codes
    tiles = _WIDE if wide else _TILES[kind][rows]
    if not layout.grouped or layout.group >= tiles.depth:
        return tiles
    # As many warps fewer, so that each thread still loads 8 bytes of codes at once.
    return tiles._replace(depth=layout.group, warps=tiles.warps * layout.group // tiles.depth)
