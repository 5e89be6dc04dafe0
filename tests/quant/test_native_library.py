"""The library of CPU kernels (`quant/native/library.py`, `quant/native/build.py`): how it is built, loaded and left
out, and its kernels under the compiler's sanitizers.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moedge.quant.native import build, library
from support.native_driver import DRIVERS, SANITIZERS, build_driver, run_driver

NEEDS_COMPILER = pytest.mark.skipif(shutil.which(build.COMPILER) is None, reason=f"{build.COMPILER} was not found")
NEEDS_LIBRARY = pytest.mark.skipif(not library.available(), reason=f"no library of CPU kernels: {library.lack()}")


def lack_of(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return library.loaded.__wrapped__().lack


def test_moedge_isa_leaves_the_library_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lack_of(monkeypatch, MOEDGE_ISA="none") == "MOEDGE_ISA=none"
    assert lack_of(monkeypatch, MOEDGE_ISA="sse").startswith("MOEDGE_ISA=sse is unknown; use none, avx2")


def test_what_was_not_built_or_from_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "HERE", tmp_path)
    assert "was not built (install g++" in lack_of(monkeypatch, MOEDGE_ISA="")
    (tmp_path / build.LIBRARY).write_bytes(b"no library")
    assert "cannot be loaded" in lack_of(monkeypatch)


@NEEDS_LIBRARY
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "version", lambda: 1)
    assert "other sources" in lack_of(monkeypatch, MOEDGE_ISA="")


@NEEDS_LIBRARY
def test_moedge_isa_forces_a_lesser_instruction_set() -> None:
    code = "from moedge.quant.native import library; print(library.loaded().isa)"
    for isa in build.SETS:
        environment = os.environ | {"MOEDGE_ISA": isa}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert list(build.SETS).index(done.stdout.strip()) <= list(build.SETS).index(isa)


def test_without_a_compiler_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    with pytest.raises(build.CannotBuild):
        build.build(tmp_path / build.LIBRARY)
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    with pytest.raises(build.CannotBuild, match="x86-64"):
        build.build(tmp_path / build.LIBRARY)
    assert list(tmp_path.iterdir()) == []


@NEEDS_LIBRARY
def test_a_wheel_with_the_library_needs_no_new_libc() -> None:
    assert build.wheel_platform(build.HERE / build.LIBRARY) == "manylinux_2_28_x86_64"


def test_a_library_that_needs_a_new_libc_is_for_this_machine(tmp_path: Path) -> None:
    newer = tmp_path / "newer.so"
    newer.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.38\0")
    assert build.wheel_platform(newer) == "linux_x86_64"


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_attention_runs_clean_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    """A sample; `make matrix ARGS=native` runs many shapes."""
    assert run_driver(build_driver(tmp_path, DRIVERS["attention"], SANITIZERS[sanitizers]), cases=8) == ""
