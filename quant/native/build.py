"""Compiles the library with g++: `python -m moedge.quant.native.build`, `make native`, and setup.py at installation.

Imports nothing of moedge: setup.py loads this file before anything is installed.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).parent
LIBRARY = "libmoedge_cpu.so"
COMPILER = "g++"
# Compiled once, for every x86-64.
COMMON = ("library.cpp",)
# Compiled once for each instruction set.
KERNELS: tuple[str, ...] = (
    "argmax.cpp", "attention.cpp", "blocks.cpp", "packing.cpp", "products.cpp", "rows.cpp", "steps.cpp",
    "tiles_widening.cpp", "widening.cpp",
)  # fmt: skip
# Of these, what has code of its own for AMX; of the others, AMX uses what is compiled for the set before it.
TILED = ("attention.cpp",)
# And what is compiled for processors without AVX2, too; and how, by the suffix of its names.
PORTABLE = ("widening.cpp",)
_PORTABLE_SETS: Mapping[str, tuple[str, ...]] = MappingProxyType({"portable": (), "ssse3": ("-mssse3",)})
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_AMX = "amx"
# Instruction sets by name, from the least to the most, in the order of `enum moedge_set`. AMX's instructions are in
# assembler, so that compilers need not know them.
SETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"avx2": _AVX2, "avx512": _AVX512, "avx512bf16": _AVX512BF16, _AMX: _AVX512BF16}
)
# Without exceptions, run-time types and C++'s runtime library, the result needs nothing but libc.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
          "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized")  # fmt: skip
_LINK = ("-shared", "-nodefaultlibs", "-lc", "-lm", "-Wl,-z,defs", "-Wl,--gc-sections")


class CannotBuild(Exception):
    """Why there is no library: no compiler, another processor, or what the compiler said."""


def sources() -> list[Path]:
    """All files that the library is made of, headers too."""
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


def version() -> int:
    """A checksum of the sources and of how they are compiled; the library has that of those that it was made of."""
    content = b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in [*sources(), Path(__file__)])
    return zlib.crc32(content)


def compilations(flags: Sequence[str] = _FLAGS) -> Iterator[tuple[str, list[str]]]:
    """For every object file its name, and the command that compiles it without `-o`."""
    common = [COMPILER, *flags, f"-DMOEDGE_VERSION={version()}u", "-c"]
    for name in COMMON:
        yield name, [*common, str(HERE / name)]
    for name in PORTABLE:
        for isa, options in _PORTABLE_SETS.items():
            defined = [f"-DMOEDGE_SET={isa}", "-DMOEDGE_LEVEL=0"]
            yield f"{isa}.{name}", [*common, *options, *defined, str(HERE / name)]
    for name in KERNELS:
        for number, (isa, options) in enumerate(SETS.items(), 1):
            if isa == _AMX and name not in TILED:
                continue
            defined = [f"-DMOEDGE_SET={isa}", f"-DMOEDGE_LEVEL={number}"]
            yield f"{isa}.{name}", [*common, *options, *defined, str(HERE / name)]


def compile_objects(folder: Path, flags: Sequence[str] = _FLAGS) -> list[str]:
    """Compiles every object file into `folder`, two at a time; their paths. Raises CannotBuild."""
    commands = [
        ([*command, "-o", str(folder / f"{name}.o")], folder / f"{name}.o") for name, command in compilations(flags)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, [command for command, _ in commands]))
    return [str(path) for _, path in commands]


def build(target: Path) -> Path:
    """Writes the library to the file `target` and returns it. Raises CannotBuild."""
    if platform.machine() not in {"x86_64", "AMD64"} or sys.platform != "linux":
        raise CannotBuild(f"the kernels are for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    if shutil.which(COMPILER) is None:
        raise CannotBuild(f"{COMPILER} was not found")
    with tempfile.TemporaryDirectory() as folder:
        objects = compile_objects(Path(folder))
        linked = target.with_suffix(".new")
        run([COMPILER, *objects, *_LINK, "-o", str(linked)])
    # A process that has the old library mapped keeps it.
    return linked.replace(target)


def wheel_platform(library: Path) -> str:
    """The platform tag of a wheel with this library: manylinux_2_28 where it needs no newer libc, else this machine's.

    The names of the versions that it needs are in its string table.
    """
    needed = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())}
    return "manylinux_2_28_x86_64" if max(needed, default=0) <= 28 else "linux_x86_64"


def run(command: list[str]) -> None:
    """Runs a command of the compiler. Raises CannotBuild."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuild(f"{COMPILER} did not start: {error}") from None
    if done.returncode:
        raise CannotBuild(f"{COMPILER} failed: {done.stderr.strip()[-2000:]}")


def main() -> int:
    try:
        print(f"built {build(HERE / LIBRARY)}")
    except CannotBuild as error:
        print(f"not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
