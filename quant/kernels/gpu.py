"""What kernels are chosen by: a GPU, and which families of Triton kernels run on it. Torch-free and Triton-free."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple, Self

# The oldest compute capability that Triton compiles for.
OLDEST_CAPABILITY = (7, 5)
# The oldest compute capability with bfloat16 tensor cores; older ones support float16 only.
BF16_CAPABILITY = (8, 0)


class Lacks(NamedTuple):
    """Why the kernels of each family cannot run, "" if they can.

    The families are attention over the KV cache, storing keys and values in it (`cache`), grouped products of
    experts, and drawing tokens (`sampling`). torch computes a family whose kernels cannot run; the kernels of the
    others are used.
    """

    attention: str = ""
    cache: str = ""
    experts: str = ""
    sampling: str = ""

    @classmethod
    def everything(cls, reason: str) -> Self:
        """No family can run, for one reason."""
        return cls(reason, reason, reason, reason)

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
