"""Loads the library of CPU kernels, and says why it cannot be used where that is so. Torch-free.

MOEDGE_ISA names the most that may be used of an instruction set (`avx2`, `avx512`, `avx512bf16`, `amx`), or `none`.
With `none`, and on a processor without AVX2, no kernel is used but those with code for such processors (`portable`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from ctypes import CDLL, c_int, c_uint32
from dataclasses import dataclass
from functools import cache
from typing import Any

from .build import HERE, LIBRARY, SETS, version

BUILD = "install g++, then: python -m moedge.quant.native.build"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The library, and the instruction set that its kernels use; `library` is None where `lack` says why not."""

    library: CDLL | None = None
    isa: str = ""
    lack: str = ""


@cache
def loaded() -> Loaded:
    """The library, loaded once in a process."""
    wanted = os.environ.get("MOEDGE_ISA", "")
    if wanted == "none":
        return Loaded(lack="MOEDGE_ISA=none")
    if wanted and wanted not in SETS:
        return Loaded(lack=f"MOEDGE_ISA={wanted} is unknown; use none, {', '.join(SETS)}")
    library, lack = _opened()
    if library is None:
        return Loaded(lack=lack)
    isa = choose(library, wanted or list(SETS)[-1])
    return Loaded(library, isa) if isa else Loaded(lack="this processor has no AVX2")


def _opened() -> tuple[CDLL | None, str]:
    """The library, whatever this processor has, or why there is none."""
    path = HERE / LIBRARY
    if not path.is_file():
        return None, f"it was not built ({BUILD})"
    try:
        library = CDLL(str(path))
        found = _called(library, "moedge_version", c_uint32)
    except (OSError, AttributeError) as error:
        return None, f"it cannot be loaded: {error}"
    return (library, "") if found == version() else (None, f"it was built from other sources than these ({BUILD})")


def choose(library: CDLL, isa: str) -> str:
    """Lets all kernels use `isa` or the most that this processor has, if that is less; "" if it has not even AVX2.

    No kernel may be running.
    """
    number = int(library.moedge_choose(c_int(list(SETS).index(isa) + 1)))
    return list(SETS)[number - 1] if number else ""


# Why kernels that were loaded are not used: one of them gave wrong numbers here.
_refusals: list[str] = []


def refuse(reason: str) -> None:
    """Uses no kernel from now on."""
    _refusals.append(reason)


def lack() -> str:
    """Why kernels cannot be used here; "" if they can."""
    return loaded().lack or "".join(_refusals[:1])


def available() -> bool:
    """Whether kernels can be used here."""
    return not lack()


def function(name: str, arguments: Sequence[Any], result: Any = None) -> Callable[..., Any]:
    """The C function `name` with its argument types, which take half of the time of a call where they are known.

    It runs without Python's lock. Raises RuntimeError where there is no library.
    """
    library = loaded().library
    if library is None:
        raise RuntimeError(f"the library of CPU kernels cannot be used: {loaded().lack}")
    found = getattr(library, name)
    found.argtypes, found.restype = list(arguments), result
    return found  # type: ignore[no-any-return]


def portable(name: str, arguments: Sequence[Any]) -> Callable[..., None] | None:
    """The C function `name`, one of MOEDGE_PORTABLE_KERNELS, with its argument types.

    None where there is no library, or one without this function.
    """
    library = loaded().library or _opened()[0]
    found = getattr(library, name, None)
    if found is not None:
        found.argtypes, found.restype = list(arguments), None
    return found


def refused() -> bool:
    """Whether a kernel gave wrong numbers here, so that none is used."""
    return bool(_refusals)


def _called(library: CDLL, name: str, result: Any) -> int:
    found = getattr(library, name)
    found.restype = result
    return int(found())
