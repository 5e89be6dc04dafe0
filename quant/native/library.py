"""The library of CPU kernels: its C interface as ctypes has it, and why it cannot be used where that is so. Torch-free.

MOEDGE_ISA names the most that may be used of an instruction set (`avx2`, `avx512`, `avx512bf16`, `amx`), or `none`.
With `none`, and on a processor without AVX2, no kernel is used but those with code for such processors (`portable`).

Constants, enums and structures are read from interface.h, where alone they stand. A structure has the fields of the
struct of the same name and refuses others; addresses are those of contiguous memory that outlives the calls.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from ctypes import CDLL, c_int, c_uint32
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from .build import HERE, LIBRARY, SETS, version

BUILD = "install g++, then: python -m moedge.quant.native.build"


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """The library, and the instruction set that its kernels use; `library` is None where `lack` says why not."""

    library: CDLL | None = None
    isa: str = ""
    lack: str = ""


@cache
def loaded() -> LoadedLibrary:
    """The library, loaded once in a process."""
    wanted = os.environ.get("MOEDGE_ISA", "")
    if wanted == "none":
        return LoadedLibrary(lack="MOEDGE_ISA=none")
    if wanted and wanted not in SETS:
        return LoadedLibrary(lack=f"MOEDGE_ISA={wanted} is unknown; use none, {', '.join(SETS)}")
    library, lack = _opened()
    if library is None:
        return LoadedLibrary(lack=lack)
    isa = choose(library, wanted or list(SETS)[-1])
    return LoadedLibrary(library, isa) if isa else LoadedLibrary(lack="this processor has no AVX2")


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


def identity() -> str:
    """Names the kernels that are used here, by their sources and instruction set; "" if none are."""
    return f"{version():08x} {loaded().isa}" if available() else ""


def lack() -> str:
    """Why kernels cannot be used here; "" if they can."""
    return loaded().lack or "".join(_refusals[:1])


def available() -> bool:
    """Whether kernels can be used here."""
    return not lack()


@cache
def function(name: str, *arguments: Any, result: Any = None) -> Callable[..., Any]:
    """The C function `name` with its argument types, which take half of the time of a call where they are known.

    It runs without Python's lock. Raises RuntimeError where there is no library.
    """
    library = loaded().library
    if library is None:
        raise RuntimeError(f"the library of CPU kernels cannot be used: {loaded().lack}")
    found = getattr(library, name)
    found.argtypes, found.restype = list(arguments), result
    return found  # type: ignore[no-any-return]


def portable(name: str, *arguments: Any) -> Callable[..., None] | None:
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


_TEXT = re.sub(r"//.*", "", (HERE / "interface.h").read_text())
_TYPES: dict[str, Any] = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}


def _enumerators(body: str) -> Mapping[str, int]:
    """The numbers of an enum by their names, in lower case and without `moedge_`."""
    numbers: dict[str, int] = {}
    for name, number in re.findall(r"(\w+)(?:\s*=\s*(\d+))?\s*(?:,|$)", body.strip()):
        numbers[name.lower().removeprefix("moedge_")] = int(number) if number else len(numbers)
    return MappingProxyType(numbers)


# By the names of enums without `moedge_`; constants have none.
ENUMS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        name.removeprefix("moedge_"): _enumerators(body)
        for name, body in re.findall(r"enum\s+(?:class\s+)?(\w*)[^{;]*\{([^}]*)\}", _TEXT)
    }
)
CONSTANTS = ENUMS[""]


def _fields(name: str) -> list[tuple[str, Any]]:
    """The fields of a struct. Raises ValueError where a line is none."""
    found = re.search(rf"struct moedge_{name} \{{(.*?)\n\}};", _TEXT, re.DOTALL)
    if found is None:
        raise ValueError(f"interface.h has no struct moedge_{name}")
    return [_field(line.strip()) for line in found[1].splitlines() if line.strip()]


def _field(line: str) -> tuple[str, Any]:
    found = re.fullmatch(r"(?:const )?(\w+) (\*?)(\w+)(?:\[MOEDGE_(\w+)\])?;", line)
    if found is None:
        raise ValueError(f"interface.h: {line!r} is no field; wanted `type name;` or `type name[COUNT];`")
    kind, pointer, name, count = found.groups()
    if pointer:
        made: Any = ctypes.c_void_p
    elif kind.removeprefix("moedge_") in ENUMS:
        made = ctypes.c_int32
    else:
        made = _TYPES[kind]
    return name, made * CONSTANTS[count.lower()] if count else made


Struct = TypeVar("Struct", bound=ctypes.Structure)


def _of_header(named: type[Struct]) -> type[Struct]:
    """NativeHeadRows with the fields of `struct moedge_head_rows` and no dictionary: other names are errors."""
    name = "_".join(re.findall("[A-Z][a-z]+", named.__name__)[1:]).lower()
    content = {"__slots__": (), "__doc__": named.__doc__, "__module__": __name__, "_fields_": _fields(name)}
    metaclass: Any = type(named)
    made: type[Struct] = metaclass(named.__name__, named.__bases__, content)
    _TYPES[f"moedge_{name}"] = made
    return made


@_of_header
class NativeVectors(ctypes.Structure):
    """One layer's keys or values in the cache."""


@_of_header
class NativeAttention(ctypes.Structure):
    """Attention of rows over their cached keys and values."""


@_of_header
class NativeMatrix(ctypes.Structure):
    """A matrix in order `tiles`."""


@_of_header
class NativeProduct(ctypes.Structure):
    """A product of rows with a matrix."""


@_of_header
class NativeExpert(ctypes.Structure):
    """The two matrices of an expert, and their biases."""


@_of_header
class NativeJob(ctypes.Structure):
    """An expert and some of its rows."""


@_of_header
class NativeMixture(ctypes.Structure):
    """The rows of all experts of a layer."""


@_of_header
class NativeRowMatrix(ctypes.Structure):
    """A matrix in order `rows`."""


@_of_header
class NativeRowJob(ctypes.Structure):
    """An expert in order `rows`, and some of its rows."""


@_of_header
class NativeRowMixture(ctypes.Structure):
    """The rows of experts in order `rows`."""


@_of_header
class NativeNorm(ctypes.Structure):
    """RMSNorm of rows, or of their sum with others."""


@_of_header
class NativeHeadRows(ctypes.Structure):
    """Heads of queries or keys, and their RMSNorm."""


@_of_header
class NativeHeads(ctypes.Structure):
    """Rotary embedding of heads, and where keys and values are stored."""


@_of_header
class NativeGating(ctypes.Structure):
    """The activations of a gated feed-forward block."""


@_of_header
class NativeRouter(ctypes.Structure):
    """Scores of experts."""


@_of_header
class NativeChoice(ctypes.Structure):
    """The experts with the largest scores."""


@_of_header
class NativeGrouping(ctypes.Structure):
    """Assignments sorted by expert."""


@_of_header
class NativeCombination(ctypes.Structure):
    """The weighed sum of experts' outputs, added to the hidden states."""


@_of_header
class NativeAttentionStep(ctypes.Structure):
    """Attention as a step."""


@_of_header
class NativeStep(ctypes.Structure):
    """A step of a decoder layer: its kind, and the address of its arguments."""


@_of_header
class NativeRun(ctypes.Structure):
    """Steps that threads run together."""


@_of_header
class NativePacking(ctypes.Structure):
    """Rows of a matrix to be quantized."""


@_of_header
class NativeWidening(ctypes.Structure):
    """Rows of MXFP4 to be widened."""


@_of_header
class NativeTilesWidening(ctypes.Structure):
    """A matrix in order `tiles` to be widened."""


@_of_header
class NativeBlocks(ctypes.Structure):
    """Blocks of a GGUF file to be dequantized."""
