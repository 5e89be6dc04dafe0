"""The smallest budget (`runtime/plan/planner.py`) gives the answers of an ample one. This dense model streams nothing:
its passes get smaller.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.real.text import QUESTIONS

pytestmark = pytest.mark.real


def batch(model: Path, folder: Path, ram: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`moedge batch` over four questions in a process of its own: a budget is that of the whole process."""
    folder.mkdir()
    rows = folder / "rows.jsonl"
    lines = [
        {"id": str(index), "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 8}
        for index, question in enumerate(QUESTIONS[:4])
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "moedge", "batch", str(model), str(rows), "-o", str(folder / "answers.jsonl"),
               "--max-sequences", "2", "--gpu-mem", "0", "--ram", ram, *options]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def answers(model: Path, folder: Path, ram: str, *options: str) -> list[str]:
    done = batch(model, folder, ram, *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["text"] for line in (folder / "answers.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_the_smallest_budget_gives_the_answers_of_an_ample_one(quant: str, model: Path, tmp_path: Path) -> None:
    """The smallest is what the refusal of a smaller one names."""
    options = ("--quant", quant, "--dtype", "fp32", "--kv", "fp32", "--deterministic")
    refused = batch(model, tmp_path / "refused", "64MiB", *options).stderr
    found = re.findall(r"--ram (\d+MiB)", refused)
    assert found, refused
    ample = answers(model, tmp_path / "ample", "6GiB", *options)
    assert answers(model, tmp_path / "tight", found[-1], *options) == ample
