"""What kernels are chosen by, and whether Triton can run them here. Free of torch, and of Triton until it is tried."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# The oldest that Triton compiles for.
OLDEST_CAPABILITY = (7, 5)


class Gpu(NamedTuple):
    """`capability` as (8, 6), `processors` that run programs side by side; `lack` says why Triton's kernels cannot run,
    "" where they can.
    """

    capability: tuple[int, int]
    processors: int
    lack: str = ""

    @property
    def has_kernels(self) -> bool:
        return self.lack == ""


# What kernels are cut for in Triton's interpreter, which runs one program at a time.
INTERPRETER = Gpu((8, 0), 1)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the host: for tests, a thousand times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


def find_gpu(place: torch.device, capability: tuple[int, int], processors: int) -> Gpu:
    """Compiles and runs one kernel there: that takes a C compiler and Python's headers, which not all machines have."""
    if capability < OLDEST_CAPABILITY:
        least, found = _dotted(OLDEST_CAPABILITY), _dotted(capability)
        lack = f"Triton compiles for compute capability {least} and newer, this GPU has {found}"
    elif find_spec("triton") is None:
        lack = "Triton is not installed (pip install triton)"
    else:
        lack = _try(place)
    return Gpu(capability, processors, lack)


def _try(place: torch.device) -> str:
    from .trial import try_kernel

    try:
        right = try_kernel(place)
    except Exception as error:
        # Of many kinds: no compiler, no headers, a driver or a GPU that this Triton does not know.
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"Triton's kernels do not run here: {first[:200]}"
    return "" if right else "Triton's kernels give wrong numbers here"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
