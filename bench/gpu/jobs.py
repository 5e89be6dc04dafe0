"""Part `jobs`: `moedge batch` as a user types it, what was predicted beside what it took.

The first job is the first run of a machine; the others know its kernels and speeds, but no job of the past.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.gpu.report import Report

ROWS, NEW_TOKENS = 1024, 128
# A shape of bench.make_model and the options of its job: 0.5, 7 and 31 GB in bfloat16.
JOBS = (
    ("s", "--gpu-mem 2GiB"),
    ("m", "--gpu-mem 3GiB"),
    ("m", "--gpu-mem 3GiB --quant nf4"),
    ("q24", "--gpu-mem 8GiB"),
    ("q24", "--gpu-mem 8GiB --quant nf4"),
    ("q24", "--gpu-mem 8GiB --ram 8GiB --quant nf4"),
    ("q24", "--gpu-mem 12GiB"),
)
KNOWN = ("machine.json", "kernel-selftests.json")
TIMEOUT_S = 240


def run_jobs(models: Path, report: Report, fake: bool) -> None:
    """Models are made in the folder `models` where they are missing."""
    for shape, options in (("toy", ""),) if fake else JOBS:
        run = partial(_job, models, shape, options, report.path.with_suffix(".known"), 8 if fake else ROWS)
        report.step("jobs", f"{shape} {options}", run)


def _write_model(model: Path) -> None:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "bench.make_model", "--shape", model.name, "--out", model], check=True)
    print(f"{model.name} was written in {time.perf_counter() - begun:.0f} s", flush=True)


def _job(models: Path, shape: str, options: str, known: Path, rows: int) -> dict[str, Any]:
    if not (model := models / shape).exists():
        _write_model(model)
    with TemporaryDirectory(dir=models) as folder:
        home = Path(folder)
        state = home / "XDG_STATE_HOME" / "moedge"
        shutil.copytree(known, state) if known.exists() else state.mkdir(parents=True)
        prompts = (f"{number} {'What is known of it? ' * (1 + number % 9)}" for number in range(rows))
        (home / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        ends = {name: str(home / name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
        ends["MOEDGE_PROGRESS"] = "plain"
        given = ["--max-tokens", NEW_TOKENS, "--temperature", 0, *options.split()]
        files = [model, home / "rows.jsonl", "-o", home / "out.jsonl", "--summary", home / "summary.json"]
        command = [sys.executable, "-m", "moedge", "batch", *map(str, [*files, *given])]
        begun = time.perf_counter()
        with (
            (home / "output").open("w+") as output,
            subprocess.Popen(command, env=os.environ | ends, stdout=output, stderr=output) as process,
        ):
            with suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT_S)
            process.kill()
        seconds, lines = time.perf_counter() - begun, (home / "output").read_text().splitlines()
        if process.returncode:
            raise RuntimeError(f"exit {process.returncode} after {seconds:.0f} s: {' | '.join(lines)[-1500:]}")
        known.mkdir(exist_ok=True)
        for name in KNOWN:
            if (state / name).exists():
                shutil.copy(state / name, known)
        summary = json.loads((home / "summary.json").read_text())
    found = summary["throughput"]["generated_tok_s"], summary["predicted"]["generated_tok_s"]
    return {
        "generated_tok_s": found[0],
        "predicted_tok_s": found[1],
        "from_command_s": seconds,
        "found": {name: summary[name] for name in ("seconds", "predicted", "throughput", "bytes", "stalls", "memory")},
        "passes": summary["passes"],
        "experts": {name: summary["experts"][name] for name in ("held", "total", "fetched")},
        "output": [line for line in lines if line.strip()][:60],
    }
