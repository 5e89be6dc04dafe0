"""Files that llama.cpp's own converter makes of a tiny checkpoint of every family give the checkpoint's tokens.

The converter comes with the sources of llama-cpp-python, which pip downloads once into build/llama.cpp. What it makes
of each family is recorded in tests/support/gguf_records, by which tests/runtime/weights/test_gguf_architectures.py
needs no converter. A file of a type of blocks is made of weights that are exact in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers

from matrix.state import ROOT, Part
from support.family_run import run_checkpoint, stock_tokens
from support.gguf_converted import FAMILIES, convert, exact_in_blocks, record, record_of, save, write_record
from support.real.smollm2 import expect

SOURCES = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FOLDER = ROOT / "build" / "llama.cpp"
QUICK = ("qwen3_5_moe_text",)
# Which experts of one matrix each may have, and which have rows or columns in another order.
FUSED = ("qwen3_next", "qwen3_5_moe_text")
BLOCKS = ("qwen3_5_moe_text", "gemma4_text", "deepseek_v3", "qwen3_next", "gpt_oss", "granitemoehybrid")


def parts(quick: bool) -> Iterator[Part]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    for family in QUICK if quick else FAMILIES:
        yield Part(f"tokens of {family}", partial(faults, family))
        yield Part(f"record of {family}", partial(changes, family))
    for family in () if quick else FUSED:
        yield Part(f"tokens of {family}, gate and up in one tensor", partial(faults, family, "ALL_F32", "fused"))
    for family in () if quick else BLOCKS:
        yield Part(f"tokens of {family} in Q8_0", partial(faults, family, "MOSTLY_Q8_0"))


def faults(family: str, kind: str = "ALL_F32", *options: str) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(family, folder / "checkpoint")
        if kind != "ALL_F32":
            exact_in_blocks(folder / "checkpoint" / "model.safetensors")
        convert(converter(), folder / "checkpoint", folder / "model.gguf", kind, *options)
        found = run_checkpoint(folder, stock_tokens(folder / "checkpoint"), "model.gguf").failure
    return [found] if found else []


def changes(family: str) -> list[str]:
    """Writes the record anew; a fault where it was another."""
    path = record_of(family)
    with tempfile.TemporaryDirectory() as folder:
        found = json.loads(json.dumps(record(converter(), family, Path(folder))))
    if path.exists() and json.loads(path.read_text()) == found:
        return []
    write_record(found, path)
    return [f"{path} was written anew"]


@cache
def converter() -> Path:
    """The folder with llama.cpp's converter. Raises SystemExit where it cannot be downloaded."""
    if not (FOLDER / "conversion").is_dir():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            done = subprocess.run([*command, "--dest", folder, SOURCES], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr.strip()}")
            (archive,) = Path(folder).glob("*.tar.gz")
            expect(archive, SHA256)
            extract(archive, FOLDER)
    return FOLDER


def extract(archive: Path, folder: Path) -> None:
    """The converter, and the package gguf that belongs to it."""
    with tarfile.open(archive) as content:
        for member in content:
            _, _, name = member.name.partition("/vendor/llama.cpp/")
            if member.isfile() and name.startswith(("conversion/", "gguf-py/gguf/")):
                content.extract(member.replace(name=name, deep=False), folder, filter="data")


if __name__ == "__main__":
    extract(Path(sys.argv[1]), FOLDER)
