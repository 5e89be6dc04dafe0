"""The C interface: what Python reads of library.h is what a compiler makes of it, and names of both sides agree."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moedge.quant.formats.format import CODE_BITS, EXPERT_FORMATS, QUANT_FORMATS, ROWS, TILES
from moedge.quant.kernels.operands import ACTIVATIONS
from moedge.quant.kv.format import VECTOR_FORMATS
from moedge.quant.native import build, library
from moedge.quant.native.library import CONSTANTS, ENUMS
from moedge.quant.tensor import CODECS


def structures() -> Iterator[tuple[str, type[ctypes.Structure]]]:
    for name, made in library._TYPES.items():
        if issubclass(made, ctypes.Structure):
            yield name, made


@pytest.mark.skipif(shutil.which(build.COMPILER) is None, reason=f"{build.COMPILER} was not found")
def test_structures_and_numbers_are_those_of_a_compiler(tmp_path: Path) -> None:
    """Every size, offset and number is asserted of the header itself."""
    stated = [f"sizeof({name}) == {ctypes.sizeof(made)}" for name, made in structures()]
    for name, made in structures():
        for field in made._fields_:
            stated.append(f"offsetof({name}, {field[0]}) == {getattr(made, field[0]).offset}")
            stated.append(f"sizeof({name}::{field[0]}) == {getattr(made, field[0]).size}")
    header = (build.HERE / "interface.h").read_text()
    assert len(list(structures())) == header.count("\nstruct ") - 1, "moedge_rows, an array of numpy, has no structure"
    for enum, numbers in ENUMS.items():
        for name, number in numbers.items():
            scoped = f"moedge_{enum}::" if f"enum class moedge_{enum} " in header else "MOEDGE_"
            stated.append(f"int({scoped}{name.upper()}) == {number}")
    source = tmp_path / "stated.cpp"
    lines = [f'static_assert({each}, "");' for each in stated]
    source.write_text("\n".join(["#include <stddef.h>", '#include "interface.h"', *lines]))
    command = [build.COMPILER, "-std=c++17", "-fsyntax-only", "-I", str(build.HERE), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(stated) > 250


@pytest.mark.parametrize("made", [made for _, made in structures()])
def test_a_name_that_is_no_field_is_refused(made: type[ctypes.Structure]) -> None:
    with pytest.raises(AttributeError):
        made().no_such_field = 1
    with pytest.raises(AttributeError):
        made(no_such_field=1)


def test_lines_that_are_no_fields_are_refused() -> None:
    for line in ("int x", "uint16_t *x, *y;", "const uint8_t **x;"):
        with pytest.raises((ValueError, KeyError)):
            library._field(line)


def test_names_are_those_of_python() -> None:
    assert set(ENUMS["codes"]) == set(CODE_BITS) - {"none"} | {"bf16"}
    assert set(ENUMS["codes"]) - {"bf16"} == {codes for codes, order in CODECS if order == TILES}
    assert set(ENUMS["weight_format"]) == {*QUANT_FORMATS, *EXPERT_FORMATS} - {"none"}
    assert set(ENUMS["order"]) == {ROWS, TILES}
    assert set(ENUMS["activation"]) == set(ACTIVATIONS)
    assert set(ENUMS["format"]) >= set(VECTOR_FORMATS)
    assert list(ENUMS["set"]) == ["none", *build.SETS]
    assert CONSTANTS["split"] % CONSTANTS["rows"] == 0
