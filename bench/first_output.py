"""Seconds until the first output and until the exit of commands, refusals among them: the median of ten runs.

    python bench/first_output.py                  all commands
    python bench/first_output.py --runs 3         fewer runs
    python bench/first_output.py --only refuse    commands whose name has this text

Wall time as a user sees it, processor time of the process beside it: on a machine that others use, only the latter
repeats. A first output later than 0.5 s and a refusal that ends later than 1 s are marked.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

MODEL = str(Path(__file__).parents[1] / "examples" / "tiny_moe" / "model")
FIRST_S, REFUSED_S = 0.5, 1.0


class Taken(NamedTuple):
    """Seconds of one run: until the first byte, until the exit, and of the processor."""

    first: float
    ended: float
    cpu: float


def commands(folder: Path) -> dict[str, list[str]]:
    """Commands by name; names of those that are refused begin with "refuse"."""
    rows, out = str(folder / "in.jsonl"), str(folder / "out.jsonl")
    batch = ["batch", MODEL, rows, "-o"]
    return {
        "--help": ["--help"],
        "--version": ["--version"],
        "batch --help": ["batch", "--help"],
        "batch": [*batch, str(folder / "new.jsonl"), "--max-tokens", "2"],
        "batch, finished": [*batch, out],
        "plan": ["plan", MODEL, rows],
        "run": ["run", MODEL, "hello", "--max-tokens", "2"],
        "prepare": ["prepare", MODEL, "-o", str(folder / "store")],
        "doctor --quick": ["doctor", "--quick"],
        "jobs ls": ["jobs", "ls"],
        "models ls": ["models", "ls"],
        "refuse model": ["batch", "no-such-model", rows, "-o", str(folder / "x.jsonl")],
        "refuse option": [*batch, str(folder / "x.jsonl"), "--quant", "int5"],
        "refuse limit": [*batch, str(folder / "x.jsonl"), "--until", "noon"],
        "refuse rows": ["batch", MODEL, str(folder / "bad.jsonl"), "-o", str(folder / "x.jsonl")],
        "refuse run": ["run", "no-such-model", "hello"],
        "refuse prepare": ["prepare", "no-such-model"],
        "refuse plan": ["plan", "no-such-model"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
        (folder / "bad.jsonl").write_text('{"prompt": \n')
        timed(["batch", MODEL, str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--max-tokens", "2"], folder)
        print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores", flush=True)
        print(f"{'command':18} {'first output':>13} {'exit':>8} {'processor':>10}", flush=True)
        for command, arguments in commands(folder).items():
            if options.only in command:
                report(command, [fresh(arguments, folder) for _ in range(options.runs)])


def fresh(arguments: list[str], folder: Path) -> Taken:
    """One run, without what an earlier run of the same command left."""
    subprocess.run(["rm", "-rf", *(str(folder / name) for name in ("new.jsonl", "new.job", "store"))], check=True)
    return timed(arguments, folder)


def timed(arguments: list[str], folder: Path) -> Taken:
    """Runs a command to its end, reading both of its outputs."""
    home = {"HOME": str(folder), "HF_HUB_OFFLINE": "1"} | {
        f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")
    }
    before, begun, first = os.times(), time.perf_counter(), None
    command = [sys.executable, "-m", "moedge.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | home) as process:
        selector = selectors.DefaultSelector()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if not os.read(key.fd, 1 << 16):
                    selector.unregister(key.fileobj)
                elif first is None:
                    first = time.perf_counter() - begun
    ended, after = time.perf_counter() - begun, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Taken(ended if first is None else first, ended, cpu)


def report(command: str, runs: list[Taken]) -> None:
    first, ended, cpu = (statistics.median(values) for values in zip(*runs, strict=True))
    late = "  late" if first > FIRST_S or (command.startswith("refuse") and ended > REFUSED_S) else ""
    print(f"{command:18} {first:11.2f} s {ended:6.2f} s {cpu:8.2f} s{late}", flush=True)


if __name__ == "__main__":
    main()
