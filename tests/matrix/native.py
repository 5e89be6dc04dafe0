"""The CPU kernels without Python and torch: against sums in double, bit by bit over threads, under every sanitizer."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from matrix.state import Part
from moedge.quant.native.build import CannotBuild
from support.native_driver import SANITIZERS, build_driver, run_driver

CASES, QUICK_CASES = 2000, 20


def parts(quick: bool) -> Iterator[Part]:
    for name, sanitizers in SANITIZERS.items():
        yield Part(f"sanitizers: {name}", partial(faults, sanitizers, QUICK_CASES if quick else CASES))


def faults(sanitizers: str, cases: int) -> list[str]:
    """What the driver printed, if it found something."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_driver(build_driver(Path(folder), sanitizers), cases, seed=1000, limit=7200)
        except CannotBuild as error:
            return [str(error)]
    return [found] if found else []
