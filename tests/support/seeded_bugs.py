"""Bugs of one kind planted in kernels: remainders that are dropped. They are found, or nothing else of their kind is.

    with planted(BUGS["columns of a row's scale"]):
        ...   # every product of this process has the bug

A bug is a replaced text in one source file. For C++ the library is compiled once more with that text, and loaded in
place of the installed one; for Python and Triton the file is loaded once more, and its functions take the place of
those that modules have. Nothing of the installed package is written.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import CDLL
from functools import cache
from pathlib import Path
from types import CellType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

from moedge.quant.native import build, library

_NATIVE = "quant/native/"
# Optimised enough for a test's sizes, and compiled in half of the time.
_FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build._FLAGS)


class Bug(NamedTuple):
    """`old` stands once in `file`, a path below the package's folder; `found_by` is a comparison's name. `least_isa` is
    the least instruction set whose code has the bug, and `most_isa` the most."""

    name: str
    file: str
    old: str
    new: str
    found_by: str
    least_isa: str = "avx2"
    most_isa: str = "amx"

    @property
    def is_native(self) -> bool:
        return self.file.startswith(_NATIVE) and not self.file.endswith(".py")

    @property
    def is_here(self) -> bool:
        """Whether the code that kernels use here has it."""
        sets = list(build.SETS)
        return (
            not self.is_native
            or library.loaded().isa in sets[sets.index(self.least_isa) : sets.index(self.most_isa) + 1]
        )


def _bugs(*bugs: Bug) -> Mapping[str, Bug]:
    return MappingProxyType({bug.name: bug for bug in bugs})


BUGS = _bugs(
    # The one that was there: sums were taken of whole parts alone.
    Bug(
        "columns of a row's scale",
        "quant/native/tiles.h",
        "    const int64_t chunks = matrix.columns / CHUNK;\n    const Codes<VALUES> source",
        "    const int64_t most = matrix.group < MOST_PART ? matrix.group : MOST_PART;\n"
        "    const int64_t chunks = matrix.columns / most * most / CHUNK;\n    const Codes<VALUES> source",
        "products in tiles",
        least_isa="avx512",
    ),
    Bug(
        "columns that many rows share",
        "quant/native/tiles.h",
        "for (int64_t begin = 0; begin < chunks; begin += SEVERAL) {",
        "for (int64_t begin = 0; begin + SEVERAL <= chunks; begin += SEVERAL) {",
        "products in tiles",
    ),
    Bug(
        "columns of integers",
        "quant/native/tiles_integer.h",
        "    const int64_t chunks = matrix.columns / CHUNK;\n    const Quads",
        "    const int64_t chunks = matrix.columns / 128 * 128 / CHUNK;\n    const Quads",
        "products in tiles",
    ),
    Bug(
        "columns of words",
        "quant/native/tiles_words.h",
        "    const int64_t chunks = matrix.columns / CHUNK;\n    const WordCodes",
        "    const int64_t chunks = matrix.columns / 128 * 128 / CHUNK;\n    const WordCodes",
        "products in tiles",
        most_isa="avx2",
    ),
    Bug(
        "signs of sums of words",
        "quant/native/tiles_words.h",
        "return int32_t(bits << 8) >> 8;",
        "return int32_t(bits & 0xffffff);",
        "products in tiles",
        most_isa="avx2",
    ),
    Bug(
        "rows of floats",
        "quant/native/tiles.h",
        "const uint8_t* first = from + r * stride + 16 * half;",
        "const uint8_t* first = from + (r ^ half) * stride + 16 * half;",
        "products in tiles",
        most_isa="avx2",
    ),
    Bug(
        "upper bits of three-bit codes",
        "quant/native/packing.cpp",
        "(four >> 2 & 0x01010101) << (at % 8);",
        "(four >> 2 & 0x01010101) << (at % 4);",
        "packing",
    ),
    Bug(
        "rows beyond two blocks",
        "quant/native/tiles.h",
        "            for (int64_t first = 0; first < in.rows; first += at_once) {\n"
        "                const int64_t rest = in.rows - first;\n"
        "                add_rows",
        "            for (int64_t first = 0; first + at_once <= in.rows; first += at_once) {\n"
        "                const int64_t rest = in.rows - first;\n"
        "                add_rows",
        "products in tiles",
        least_isa="avx512",
    ),
    Bug(
        "groups of a tile",
        "quant/native/tiles.h",
        "return (tile * (columns / group) + at) * OUTPUTS; }",
        "return (tile * (columns / 128 * 128 / group) + at) * OUTPUTS; }",
        "products in tiles",
    ),
    Bug(
        "tiles of a matrix",
        "quant/native/products.cpp",
        "items = ceil_of(matrix.tiles(), step);",
        "items = matrix.tiles() < step ? 1 : matrix.tiles() / step;",
        "products in tiles",
    ),
    Bug(
        "chunks of an expert's inner numbers",
        "quant/native/products.cpp",
        "const int64_t chunks = any.down.columns / CHUNK, step",
        "const int64_t chunks = any.down.columns / 128 * 128 / CHUNK, step",
        "experts",
    ),
    Bug(
        "columns of a gate",
        "quant/native/steps.cpp",
        "const int64_t pieces = (gating.columns + Gating::COLUMNS - 1) / Gating::COLUMNS;",
        "const int64_t pieces = gating.columns < Gating::COLUMNS ? 1 : gating.columns / Gating::COLUMNS;",
        "gates",
    ),
    Bug(
        "experts of a router",
        "quant/native/steps.cpp",
        "const int64_t items = (router.experts + Router::EXPERTS - 1) / Router::EXPERTS;",
        "const int64_t items = router.experts < Router::EXPERTS ? 1 : router.experts / Router::EXPERTS;",
        "routers",
    ),
    Bug(
        "rows of an expert",
        "quant/native/steps.cpp",
        "(rows_left = end - first) > 0; first",
        "(rows_left = end - first) >= at_once; first",
        "mixtures",
    ),
    Bug(
        "elements of a norm",
        "quant/native/steps.cpp",
        "        for (int64_t i = 0; i < columns; i += W)\n            to_bf16(mul(mul(from_bf16(from + i), scale)",
        "        for (int64_t i = 0; i < columns / 128 * 128; i += W)\n"
        "            to_bf16(mul(mul(from_bf16(from + i), scale)",
        "norms",
    ),
    Bug(
        "heads of a group",
        "quant/native/attention.cpp",
        "        if (packed) {\n            weigh_packed",
        "        if (packed && n < w.num / 4 * 4 + 4 * (w.num < 4)) {\n            weigh_packed",
        "attention",
        least_isa="avx512bf16",
    ),
    Bug(
        "keys of a split",
        "quant/native/attention.cpp",
        "const int from = seen.from / TILE * TILE, to = int(padded(seen.to, TILE));",
        "const int from = seen.from / TILE * TILE, to = seen.to < TILE ? TILE : seen.to / TILE * TILE;",
        "attention",
    ),
    Bug(
        "elements of a query",
        "quant/native/attention.h",
        "return groups == 0 ? 0 : (v.width / groups + SCALED - 1) / SCALED;",
        "return groups == 0 ? 0 : v.width / groups / SCALED;",
        "attention",
        least_isa="avx512bf16",
    ),
    Bug(
        "last columns of int8 rows",
        "quant/native/packing.cpp",
        "        if (whole == some.columns) continue;\n",
        "        continue;\n",
        "packing",
    ),
    Bug(
        "last columns of a row's widest group",
        "quant/native/packing.cpp",
        "for (int64_t c = 0; c < columns; c += GROUP, most",
        "for (int64_t c = 0; c < columns / 128 * 128; c += GROUP, most",
        "packing",
    ),
    Bug(
        "chunks of a widened tile",
        "quant/native/tiles_widening.cpp",
        "for (int64_t chunk = 0; chunk < matrix.columns / CHUNK; chunk++) {",
        "for (int64_t chunk = 0; chunk < matrix.columns / 128 * 128 / CHUNK; chunk++) {",
        "widening",
    ),
    Bug(
        "groups of MXFP4",
        "quant/native/widening.cpp",
        "for (int64_t g = 0; g < columns / GROUP; g++)",
        "for (int64_t g = 0; g < columns / (4 * GROUP) * 4; g++)",
        "widening",
    ),
    Bug(
        "rows of a deterministic product",
        "quant/matmul/matmul.py",
        "for start in range(0, len(x), TILE):",
        "for start in range(0, max(1, len(x) // TILE * TILE), TILE):",
        "other products",
    ),
    Bug(
        "strips of a matrix",
        "quant/matmul/matmul.py",
        "return [slice(start, start + rows) for start in range(0, layout.shape[0], rows)]",
        "return [slice(start, start + rows) for start in range(0, max(1, layout.shape[0] // rows * rows), rows)]",
        "other products",
    ),
    Bug(
        "columns of a Triton product",
        "quant/kernels/product.py",
        "    for start in range(0, S.num_columns, S.depth):\n"
        "        scales = load_scales(packed, table, place, start, S)",
        "    for start in range(0, S.num_columns // 64 * 64, S.depth):\n"
        "        scales = load_scales(packed, table, place, start, S)",
        "grouped products",
    ),
    Bug(
        "rows of a Triton product",
        "quant/kernels/product.py",
        "for first in range(span.start, span.stop, height)",
        "for first in range(span.start, max(span.start + 1, span.stop - height + 1), height)",
        "grouped products",
    ),
    Bug(
        "groups of Triton's int3 codes",
        "quant/kernels/product.py",
        "(scales[2][0], others, high), (scales[3][0], others, high))",
        "(scales[2][0], low, high), (scales[3][0], low, high))",
        "grouped products",
    ),
    Bug(
        "sign of Triton's int3 scales",
        "quant/kernels/product.py",
        "scales = with_codes(scales, packed, place, start, S)",
        "scales = with_codes(parts_of(tl.abs(factors).to(S.dtype), zeros.to(S.dtype), S), packed, place, start, S)",
        "grouped products",
    ),
    Bug(
        "pairs that share a byte of Triton's int3 codes",
        "quant/kernels/product.py",
        "bits = codes >> (places * (2 * WIDTH)).to(tl.uint8)[None, :]",
        "bits = codes >> (places * WIDTH).to(tl.uint8)[None, :]",
        "grouped products",
    ),
    Bug(
        "groups of Triton's vq2 codes",
        "quant/kernels/product.py",
        "(scales[1][0], scales[1][1], more, signs))",
        "(scales[1][0], scales[1][1], points, signs))",
        "grouped products",
    ),
    Bug(
        "pairs that share a byte of Triton's vq2 signs",
        "quant/kernels/product.py",
        "signs = raise_bits(signs, table, 4, S)",
        "signs = signs << 4",
        "grouped products",
    ),
    Bug(
        "keys of a Triton split",
        "runtime/attention/kernels/paged.py",
        "runs = tl.cdiv(tl.maximum(end - begin, 0), S.keys)",
        "runs = tl.maximum(tl.maximum(end - begin, 0) // S.keys, 1)",
        "paged attention",
    ),
    Bug(
        "elements of a Triton head",
        "runtime/attention/kernels/paged.py",
        "        codes = tl.load(pointers, mask=columns < COLUMNS, other=0)\n",
        "        codes = tl.load(pointers, mask=columns < COLUMNS // 32 * 32, other=0)\n",
        "paged attention",
    ),
    Bug(
        "halves of Triton's int4 keys",
        "runtime/attention/kernels/paged.py",
        "product(high, second, products, S)",
        "product(high, first, products, S)",
        "paged attention",
    ),
    Bug(
        "zero points of Triton's int4 values",
        "runtime/attention/kernels/paged.py",
        "add_columns(high_added, fade, p * high_zeros[None, :], S)",
        "add_columns(high_added, fade, p * 0.0, S)",
        "paged attention",
    ),
    Bug(
        "vectors that are rotated",
        "quant/kv/codec.py",
        "rotated = torch.empty_like(rows)\n        tile, product = self._tile\n"
        "        for start in range(0, len(rows), ROTATED_ROWS):",
        # What is left out would be what memory had, which may be right.
        "rotated = torch.zeros_like(rows)\n        tile, product = self._tile\n"
        "        for start in range(0, max(1, len(rows) // ROTATED_ROWS * ROTATED_ROWS), ROTATED_ROWS):",
        "key transforms",
    ),
)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """While entered, this process computes with the bug. Raises CannotBuild for C++ without a compiler."""
    with _planted_library(library_with(bug)) if bug.is_native else _planted_module(bug):
        yield


@cache
def library_with(bug: Bug | None) -> Path:
    """The library compiled with a bug, or without one; kept until the process ends."""
    folder = Path(_folder(), re.sub(r"\W+", "-", bug.name) if bug else "none")
    shutil.copytree(build.HERE, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    changed = set(_changed(folder, bug)) if bug else set(build.COMMON + build.KERNELS)
    objects = {}
    with ThreadPoolExecutor(2) as pool:
        for name, command in build.compilations(_FLAGS):
            if _source(name) not in changed or (bug and not _is_used(name)):
                objects[name] = library_with(None).parent / f"{name}.o"
                continue
            objects[name] = folder / f"{name}.o"
            moved = [part.replace(str(build.HERE), str(folder)) for part in command]
            pool.submit(build.run, [*moved, "-o", str(objects[name])])
    made = folder / build.LIBRARY
    build.run([build.COMPILER, *map(str, objects.values()), *build._LINK, "-o", str(made)])
    return made


def _source(name: str) -> str:
    """The source file of an object, `avx2.steps.cpp` or `library.cpp`."""
    return name if name in build.COMMON else name.partition(".")[2]


def _is_used(name: str) -> bool:
    """Whether the instruction set that kernels use here takes this object."""
    isa = library.loaded().isa
    sets = (isa, "avx512bf16") if isa == "amx" else (isa,)
    return name in build.COMMON or name.partition(".")[0] in sets


def _changed(folder: Path, bug: Bug) -> Iterator[str]:
    """Writes the bug into the copy in `folder`; the names of the sources that it is part of."""
    changed = folder / bug.file.removeprefix(_NATIVE)
    changed.write_text(_replaced(changed.read_text(), bug))
    names = {changed.name}
    while more := {each.name for each in folder.glob("*.h") if _includes(each, names)} - names:
        names |= more
    for source in folder.glob("*.cpp"):
        if source.name in names or _includes(source, names):
            yield source.name


def _includes(source: Path, names: set[str]) -> bool:
    return any(f'#include "{name}"' in source.read_text() for name in names)


def _replaced(text: str, bug: Bug) -> str:
    if text.count(bug.old) != 1:
        raise ValueError(
            f"{bug.name}: {bug.file} has its text {text.count(bug.old)} times, once is wanted; write it anew"
        )
    return text.replace(bug.old, bug.new)


@cache
def _folder() -> str:
    kept = tempfile.TemporaryDirectory(prefix="moedge-seeded-")
    _kept.append(kept)
    return kept.name


_kept: list[Any] = []


@contextmanager
def _planted_library(path: Path) -> Iterator[None]:
    opened = library._opened
    library._opened = lambda: (CDLL(str(path)), "")  # type: ignore[assignment]
    _forget_functions()
    try:
        yield
    finally:
        library._opened = opened  # type: ignore[assignment]
        _forget_functions()


def _forget_functions() -> None:
    """Lets all that keeps functions of the library ask for them again."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("moedge.quant", "moedge.runtime.attention")):
            for each in list(vars(module).values()):
                if callable(clear := getattr(each, "cache_clear", None)):
                    clear()


@contextmanager
def _planted_module(bug: Bug) -> Iterator[None]:
    name = "moedge." + bug.file.removesuffix(".py").replace("/", ".")
    original = importlib.import_module(name)
    assert original.__file__ is not None
    with tempfile.TemporaryDirectory(prefix="moedge-seeded-") as folder:
        path = Path(folder, Path(bug.file).name)
        path.write_text(_replaced(Path(original.__file__).read_text(), bug))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        changed = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(changed)
        undo = list(_exchange(original, changed))
        try:
            yield
        finally:
            for back in undo:
                back()


def _exchange(original: ModuleType, changed: ModuleType) -> Iterator[Callable[[], None]]:
    """Puts functions and methods of `changed` where those of `original` are used; what takes each of them back."""
    for name, mine in vars(original).items():
        theirs = vars(changed).get(name)
        # A kernel of Triton has its function inside, and in some releases no module of its own.
        if getattr(getattr(mine, "fn", mine), "__module__", "") != original.__name__ or theirs is None:
            continue
        if isinstance(mine, type):
            for method, value in vars(theirs).items():
                if isinstance(value, FunctionType) and not method.startswith("__"):
                    yield _set(mine, method, _method_of(mine, value))
            continue
        for module in [each for key, each in sys.modules.items() if key.startswith(("moedge", "support"))]:
            for used in [key for key, value in vars(module).items() if value is mine]:
                yield _set(module, used, theirs)


def _method_of(owner: type, function: FunctionType) -> FunctionType:
    """A function of another class of the same name, whose `super()` means `owner`'s."""
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    closure = tuple(CellType(owner) if name == "__class__" else cell for name, cell in zip(names, cells, strict=True))
    moved = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    moved.__kwdefaults__ = function.__kwdefaults__
    return moved


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)
