"""Part `races`: streamed slots are poisoned before every copy, and compute is held up; CUDA's own checker, too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu.checks import device_for_run, tiny_case
from bench.gpu.report import Report
from moedge.offload.stream.cuda_lane import CudaLane
from moedge.runtime.weights import streaming as lanes

ROOT = Path(__file__).parents[2]
POISON = 0xFF
REPEATS = 20
TOOLS = ("memcheck", "racecheck")


def run_races(report: Report, fake: bool) -> None:
    for family, quant in (("mixtral", "none"), ("qwen3_moe", "nf4")):
        report.step("races", f"{family} {quant}, poisoned", partial(_poisoned, family, quant, fake))
    for tool in TOOLS:
        report.step("races", f"compute-sanitizer {tool}", partial(_sanitize, tool, fake))


def _poisoned(family: str, quant: str, fake: bool) -> dict[str, Any]:
    """The least that is held, again and again, behind compute that holds the stream up for random times."""
    count = 3 if fake else REPEATS
    with tiny_case(family, quant) as (case, _), _poisoning():
        with device_for_run(fake, True, 0) as device:
            wanted = case.run(case.plan(device, 1.0), device).tokens
        for number in range(count):
            with device_for_run(fake, True, number) as device:
                if not fake:
                    torch.cuda._sleep(1_000_000 * (number % 5))
                if case.run(case.plan(device, 0.0), device).tokens != wanted:
                    raise AssertionError(f"run {number} gave other tokens: something was read before it was there")
    return {"runs": count, "poisoned_nbytes": _PoisonedLane.num_poisoned}


class _PoisonedLane(CudaLane):
    """Whoever reads a slot too early, or not all of it was copied, reads NaN."""

    num_poisoned = 0

    def move(self, begin: int, slot: Any) -> None:
        # On the fake device every copy poisons its slot by itself, when the copy begins.
        if torch.cuda.is_available():
            self._memory[slot.offset : slot.offset + slot.nbytes].fill_(POISON)
        _PoisonedLane.num_poisoned += slot.nbytes
        super().move(begin, slot)


@contextmanager
def _poisoning() -> Iterator[None]:
    with patch.object(lanes, "CudaLane", _PoisonedLane):
        yield


def _sanitize(tool: str, fake: bool) -> dict[str, Any]:
    """NVIDIA's checker over one run of the engine with everything streamed."""
    program = shutil.which("compute-sanitizer")
    if fake or program is None:
        return {"skipped": "no GPU" if fake else "compute-sanitizer is not installed"}
    test = "tests/device/test_gpu.py::test_greedy_tokens_are_those_of_the_processor"
    command = [
        program,
        "--tool",
        tool,
        # Calls that torch makes to learn what a driver allows, and that fail, are no errors.
        "--report-api-errors",
        "no",
        "--error-exitcode",
        "9",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        test,
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=420, env=environment)
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", ended.stdout)
    if ended.returncode:
        raise AssertionError(f"{tool} ended with {ended.returncode}: {found or ended.stdout[-500:]}")
    return {"summary": found[-1] if found else "no errors"}
