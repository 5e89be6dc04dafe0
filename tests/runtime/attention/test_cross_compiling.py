"""Kernels compile for GPUs that are not there, without spilling: the largest of each; `make matrix` takes them all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "kernels.py"


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, object]]:
    # In a process of its own: this one has Triton's interpreter in place of its compiler.
    command = [sys.executable, str(BENCH), "compile", "--sample", "--json"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_every_architecture_has_its_kernels(compiled: list[dict[str, object]]) -> None:
    assert {kernel["arch"] for kernel in compiled} == {75, 80, 86, 89, 90, 120}


def test_nothing_spills_more_than_256_bytes(compiled: list[dict[str, int]]) -> None:
    assert max(kernel["spill"] for kernel in compiled) <= 256
    assert max(kernel["registers"] for kernel in compiled) > 100, "a real kernel takes more registers than that"


def test_tensor_cores_are_used_where_there_are_some(compiled: list[dict[str, object]]) -> None:
    dots = [kernel for kernel in compiled if str(kernel["kernel"]).split(",")[0] in {"decode", "extend", "down"}]
    assert dots
    for kernel in dots:
        assert kernel["tensor_cores"] == ("fp32" not in str(kernel["kernel"])), kernel
