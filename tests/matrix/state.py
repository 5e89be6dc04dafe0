"""A long run in parts: what passed is kept in build/matrix, so that an interrupted run continues where it was."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "matrix"
# A part that passed with other code has shown nothing about this one.
SOURCES = ("quant", "offload", "moe", "runtime", "apps", "cli", "tests/support", "tests/matrix", "tests/native")
SUFFIXES = {".py", ".c", ".cpp", ".h"}


class Part(NamedTuple):
    """One step of a run. `check` returns its faults, none where all is well; `name` does not change between runs."""

    name: str
    check: Callable[[], list[str]]


def code_key() -> str:
    """A digest of all sources that a run depends on, by their paths inside the repository."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def run_parts(name: str, parts: Iterable[Part], folder: Path = FOLDER, code: str | None = None) -> list[str]:
    """Runs the parts of run `name` that have not passed with this code; returns the faults of all of them.

    Every part that passes is written to `folder`/`name`.json before the next one begins. A part that failed runs again
    the next time. When all have passed, the file is removed: the next run begins at its first part.
    """
    code = code_key() if code is None else code
    path = folder / f"{name}.json"
    passed = _passed(path, code)
    faults: list[str] = []
    for part in parts:
        if part.name in passed:
            print(f"{name}: {part.name} passed before ({passed[part.name]:.1f} s)", flush=True)
            continue
        begun = time.perf_counter()
        found = part.check()
        seconds = time.perf_counter() - begun
        print(f"{name}: {part.name}, {'; '.join(found) or 'no fault'} ({seconds:.1f} s)", flush=True)
        faults += [f"{name}: {part.name}: {fault}" for fault in found]
        if not found:
            passed[part.name] = round(seconds, 2)
            _write(path, {"code": code, "passed": passed})
    if not faults:
        path.unlink(missing_ok=True)
    return faults


def _passed(path: Path, code: str) -> dict[str, float]:
    try:
        state = json.loads(path.read_text())
        passed: dict[str, float] = state["passed"] if state["code"] == code else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
    return passed


def _write(path: Path, state: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1) + "\n")
    new.replace(path)
