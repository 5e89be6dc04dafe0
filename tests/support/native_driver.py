"""Builds the drivers that call the CPU kernels without Python and torch, with the compiler's sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from moedge.quant.native import build

_FOLDER = Path(__file__).parents[1] / "native"
# By what they call.
DRIVERS = {"attention": _FOLDER / "driver.cpp"} | {each: _FOLDER / f"{each}.cpp" for each in ("packing", "products")}
# Not together: ThreadSanitizer has a memory map of its own.
SANITIZERS = {"address, undefined": "address,undefined", "thread": "thread"}


def build_driver(folder: Path, source: Path, sanitizers: str) -> Path:
    """The driver `source`, in `folder`, with the sanitizers of `-fsanitize`. Raises CannotBuild."""
    flags = ("-std=c++17", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    objects = build.compile_objects(folder, flags)
    driver = folder / "driver"
    build.run([build.COMPILER, *flags, "-I", str(build.HERE), str(source), *objects, "-lpthread", "-o", str(driver)])
    return driver


def run_driver(driver: Path, cases: int, seed: int = 0, limit: float = 600) -> str:
    """What is wrong; "" if nothing is."""
    # A sanitizer maps terabytes of addresses, which a limit on them would refuse.
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    command = [str(driver), str(cases), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=environment)
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"[-2000:]
