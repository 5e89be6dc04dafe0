"""The CPU kernels without Python and torch: against sums in double, bit by bit over threads, under every sanitizer."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from matrix.state import Part
from moedge.quant.native.build import CannotBuild
from support.native_driver import DRIVERS, SANITIZERS, build_driver, run_driver

CASES, QUICK_CASES = 2000, 20


def parts(quick: bool) -> Iterator[Part]:
    for kernels, driver in DRIVERS.items():
        for name, sanitizers in SANITIZERS.items():
            run = partial(faults, driver, sanitizers, QUICK_CASES if quick else CASES)
            yield Part(f"{kernels}, sanitizers: {name}", run)


def faults(driver: Path, sanitizers: str, cases: int) -> list[str]:
    """What the driver printed, if it found something."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_driver(build_driver(Path(folder), driver, sanitizers), cases, seed=1000, limit=7200)
        except CannotBuild as error:
            return [str(error)]
    return [found] if found else []
