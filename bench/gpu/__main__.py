"""bench/gpu.sh: parts of the evidence that a GPU must give."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from moedge.computing import settle

# Before torch is imported: passes run as users' do.
settle()

import torch

# Before Triton is imported: its kernels run in the interpreter where there is no GPU.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from functools import partial

from bench.gpu.budgets import run_budgets
from bench.gpu.checks import run_checks
from bench.gpu.hour import run_hour
from bench.gpu.jobs import run_jobs
from bench.gpu.races import run_races
from bench.gpu.random_model import CONFIGS
from bench.gpu.report import Report, machine
from bench.gpu.throughput import run_model
from bench.kernels import run_kernels

PARTS = {"hour": run_hour, "checks": run_checks, "kernels": run_kernels, "races": run_races, "budgets": run_budgets}
PARTS |= {name: partial(run_model, name) for name in CONFIGS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "jobs", "all"])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--again", action="store_true", help="run every step, also those that the file has")
    parser.add_argument("--only", default="", metavar="TEXT", help="run the steps with this text in their name")
    parser.add_argument("--models", type=Path, help="where `jobs` makes its models of up to 31 GB, and keeps them")
    options = parser.parse_args()
    with ExitStack() as stack:
        models = options.models or Path(stack.enter_context(TemporaryDirectory()))
        run({**PARTS, "jobs": partial(run_jobs, models)}, options)


def run(parts: Mapping[str, Callable[[Report, bool], None]], options: argparse.Namespace) -> None:
    fake = not torch.cuda.is_available()
    if fake:
        print("no GPU is here: the checks run on the fake device of the tests; times and rates mean nothing")
    report = Report(options.out, options.again, machine(fake), options.only)
    for part in parts if "all" in options.parts else options.parts:
        parts[part](report, fake)
    left = f", {report.num_left} steps left: call it again" if report.num_left else ""
    print(f"{'all passed' if report.ok else 'SOME FAILED'}{left}; {options.out}")
    sys.exit(not report.ok)


if __name__ == "__main__":
    main()
