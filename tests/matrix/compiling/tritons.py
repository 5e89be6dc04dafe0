"""Which Tritons kernels have to compile with: what CUDA builds of torch pin, and the newest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
TABLE = Path(__file__).with_name("triton_versions.json")
# Ignored by git; a release of Triton takes 0.6 GiB.
CACHE = ROOT / "build" / "kernels"


def pinned() -> dict[str, str]:
    """The Triton that each supported release of torch pins, by torch's version."""
    found: dict[str, str] = json.loads(TABLE.read_text())["of_torch"]
    return found


def versions() -> list[str]:
    """All Tritons of the table, oldest first."""
    table = json.loads(TABLE.read_text())
    return sorted({*table["of_torch"].values(), table["newest"]}, key=_numbers)


def oldest_and_newest_pinned() -> list[str]:
    found = sorted(set(pinned().values()), key=_numbers)
    return [found[0], found[-1]]


def install(version: str) -> Path:
    """The folder that holds this Triton: this environment's, or one that has nothing else.

    Raises RuntimeError where pip cannot install it.
    """
    if (spec := find_spec("triton")) is not None and metadata.version("triton") == version:
        assert spec.origin is not None
        return Path(spec.origin).parents[1]
    folder = CACHE / f"triton-{version}"
    if not (folder / f"triton-{version}.dist-info").exists():
        _pip("install", "--no-deps", "--upgrade", "--target", str(folder), f"triton=={version}")
    return folder


def differences() -> list[str] | None:
    """Where the table is not what wheels of torch say, in words; None where no registry answers.

    Asks for metadata only. The CPU's wheels pin nothing and are not compared.
    """
    table, found = pinned(), {torch: wheel_pins(f"torch==={torch}") for torch in pinned()}
    newest = wheel_pins(_supported_torch())
    if newest is None and not any(found.values()):
        return None
    wrong = [
        f"torch {torch} pins Triton {wheel[1]}, and {TABLE.name} says {table[torch]}"
        for torch, wheel in found.items()
        if wheel is not None and wheel[1] not in (None, table[torch])
    ]
    if newest is not None and newest[0] not in table:
        wrong.append(f"torch {newest[0]} is supported, and {TABLE.name} does not name it")
    return wrong


def wheel_pins(requirement: str) -> tuple[str, str | None] | None:
    """Version of the torch that pip would install, and the Triton that it pins; None where pip finds none."""
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--report", "-")
    try:
        report = json.loads(_pip("install", *options, requirement))
    except (RuntimeError, ValueError, subprocess.TimeoutExpired):
        return None
    wheel = report["install"][0]["metadata"]
    needs = map(Requirement, wheel.get("requires_dist", []))
    pins = [str(need.specifier) for need in needs if need.name == "triton"]
    return wheel["version"].split("+")[0], pins[0].removeprefix("==") if pins else None


def _supported_torch() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(need for need in project["dependencies"] if re.match(r"torch\b", need))


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--quiet", "--retries", "1", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)} failed: {result.stderr.strip()[-400:]}")
    return result.stdout


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
