"""What kernels are chosen by: a GPU, and which families of Triton's kernels run there. Free of torch and of Triton."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

# The oldest that Triton compiles for.
OLDEST_CAPABILITY = (7, 5)
# The oldest with tensor cores for bfloat16; before it they take float16.
BF16_CAPABILITY = (8, 0)


class Lacks(NamedTuple):
    """Why the kernels of each family cannot run, "" where they can: attention over the cache, storing keys and values
    into it (`cache`), products of grouped experts.

    A family that cannot run is computed by torch; the others stay in use.
    """

    attention: str = ""
    cache: str = ""
    experts: str = ""

    @classmethod
    def everything(cls, reason: str) -> Lacks:
        return cls(reason, reason, reason)

    @property
    def reasons(self) -> dict[str, str]:
        """By family, of those that cannot run."""
        return {family: reason for family, reason in self._asdict().items() if reason}


class Gpu(NamedTuple):
    """`capability` as (8, 6), (0, 0) where nobody knows it; `processors` that run programs side by side."""

    capability: tuple[int, int]
    processors: int
    lacks: Lacks = Lacks()

    @property
    def computes_bf16(self) -> bool:
        """Whether bfloat16 is as fast there as float16; taken to be where nothing is known."""
        return self.capability == (0, 0) or self.capability >= BF16_CAPABILITY


# What kernels are cut for in Triton's interpreter, which runs one program at a time.
INTERPRETER = Gpu((8, 0), 1)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the host: for tests, a thousand times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


def triton_lack(capability: tuple[int, int]) -> str:
    """Why no kernel of Triton's can run, before any is tried; "" where they may."""
    if capability < OLDEST_CAPABILITY:
        least, found = dotted(OLDEST_CAPABILITY), dotted(capability)
        return f"Triton compiles for compute capability {least} and newer, this GPU has {found}"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return ""


def lack_of(trial: Callable[[], str]) -> str:
    """Why the kernels that `trial` runs cannot be used: the launch that it says gave wrong numbers, or its error."""
    try:
        wrong = trial()
    except Exception as error:
        # Of many kinds: no compiler, no headers, a driver or a GPU that this Triton does not know, a kernel that this
        # Triton does not compile or this GPU has no room for.
        return f"Triton's kernels do not run here: {_brief(error)}"
    return wrong and f"Triton's kernels give wrong numbers here: {wrong}"


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _brief(error: BaseException) -> str:
    """Its type and first line; of the error beneath where Triton's compiler quotes the kernel around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = str(getattr(error, "error_message", None) or error).strip().splitlines()
    text = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
