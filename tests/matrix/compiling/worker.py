"""Compiles all subjects for one architecture under the Triton that this process has; `main.py` starts it.

Prints a JSON line for each: facts, broken rules, warps per SM, or the error. What was compiled before from the same
sources with the same constants is taken from the results file.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import triton
from triton.runtime.driver import driver

from matrix.compiling import facts, rules, subjects, tritons

# What becomes code on the device beside a kernel's own file, and what reads it.
SOURCES = ("quant/kernels/decode.py", "tests/matrix/compiling/facts.py")


def main(arch: int, quick: bool, only: str, results: Path) -> None:
    driver.set_active(facts.OtherGpu(arch))
    known = read(results)
    shared = "".join((subjects.ROOT / path).read_text() for path in SOURCES)
    with results.open("a") as file:
        for subject in subjects.quick(arch) if quick else subjects.subjects(arch):
            if only not in subject.name:
                continue
            launch = subject.launch()
            sources = Path(inspect.getfile(launch.kernel.fn)).read_text() + shared
            whole = f"{triton.__version__} sm{arch} {facts.specialization(launch)} {sources}"
            key = hashlib.sha256(whole.encode()).hexdigest()[:32]
            fresh = key not in known
            if fresh:
                known[key] = compiled(launch)
                file.write(json.dumps({"key": key, "facts": known[key]}) + "\n")
                file.flush()
            print(json.dumps(report(subject, known[key], arch) | {"fresh": fresh, "key": key}), flush=True)


def read(results: Path) -> dict[str, Any]:
    """Facts by key; a line that a killed run left unfinished is none."""
    found = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[entry["key"]] = entry["facts"]
    return found


def compiled(launch: Any) -> dict[str, Any]:
    try:
        return facts.compile_launch(launch)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return {"error": f"{type(error).__name__}: {str(error)[-400:]}"}


def report(subject: subjects.Subject, found: dict[str, Any], arch: int) -> dict[str, Any]:
    about = {"name": subject.name, "kernel": subject.kernel, "arch": arch, "triton": triton.__version__}
    if "error" in found:
        return about | {"broken": [f"does not compile: {found['error']}"]}
    warps = rules.warps_per_sm(found, arch)
    pinned = triton.__version__ in tritons.pinned().values()
    broken = list(rules.broken(subject, found, arch, pinned))
    return about | found | {"hot": subject.hot, "dots": subject.dots, "warps_per_sm": warps, "broken": broken}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "quick", sys.argv[3], Path(sys.argv[4]))
