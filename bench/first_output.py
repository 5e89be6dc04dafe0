"""Seconds until the first output and until the exit of commands, refusals among them: the median of ten runs.

    python -m bench.first_output                  all commands
    python -m bench.first_output --runs 3         fewer runs
    python -m bench.first_output --only refuse    commands whose name has this text

Outputs go to a terminal, as for a person. Wall time, and processor time (user and system) of the process beside it: on
a machine that others use, only the latter repeats. `first` are the seconds until the first byte, beside the processor
time that the process had used by then. A first output later than 0.5 s and a refusal that ends later than 1 s are
marked "late"; where processor time alone is more than that, "slow".
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from moedge.offload.errors import ExitCode

MODEL = str(Path(__file__).parents[1] / "examples" / "tiny_moe" / "model")
FIRST_S, REFUSED_S = 0.5, 1.0


class Taken(NamedTuple):
    """Seconds of one run, by the clock and of the processor: until the first byte, and until the exit; its code."""

    first: float
    first_cpu: float
    ended: float
    cpu: float
    code: int


def commands(folder: Path) -> dict[str, list[str]]:
    """Commands by name; names of those that are refused begin with "refuse"."""
    rows, out, empty = str(folder / "in.jsonl"), str(folder / "out.jsonl"), str(folder / "empty")
    asked = ["-o", str(folder / "x.csv"), "--task", "summarize"]
    batch = ["batch", MODEL, rows, "-o"]
    return {
        "--help": ["--help"],
        "--version": ["--version"],
        "batch --help": ["batch", "--help"],
        "batch": [*batch, str(folder / "new.jsonl"), "--max-tokens", "2"],
        "batch, finished": [*batch, out, "--max-tokens", "2"],
        "plan": ["plan", MODEL],
        "plan, rows": ["plan", MODEL, rows],
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
        "refuse budget": [*batch, str(folder / "x.jsonl"), "--gpu-mem", "0", "--ram", "10MiB"],
        "refuse docs": ["docs", "no-such-model", str(folder), *asked],
        "refuse docs, empty": ["docs", MODEL, empty, *asked],
        "refuse docs, budget": ["docs", MODEL, str(folder / "texts"), *asked, "--gpu-mem", "0", "--ram", "10MiB"],
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
        (folder / "empty").mkdir()
        (folder / "texts").mkdir()
        (folder / "texts" / "a.txt").write_text("hello")
        timed(["batch", MODEL, str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--max-tokens", "2"], folder)
        print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores", flush=True)
        print(f"{'command':19} {'first':>10} {'CPU':>10} {'exit':>10} {'CPU':>10}", flush=True)
        for command, arguments in commands(folder).items():
            if options.only in command:
                runs = [fresh(arguments, folder) for _ in range(options.runs)]
                for code in {run.code for run in runs}:
                    if code == ExitCode.BUG or (code == ExitCode.OK) == command.startswith("refuse"):
                        raise SystemExit(f"{command} ended with {code}: that is not what was to be timed")
                report(command, runs)


def fresh(arguments: list[str], folder: Path) -> Taken:
    """One run, without what an earlier run of the same command left."""
    subprocess.run(["rm", "-rf", *(str(folder / name) for name in ("new.jsonl", "new.job", "store"))], check=True)
    return timed(arguments, folder)


def timed(arguments: list[str], folder: Path) -> Taken:
    """Runs a command to its end on a terminal of its own."""
    home = {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color"} | {
        f"XDG_{kind}_HOME": str(folder / kind) for kind in ("STATE", "CACHE", "CONFIG")
    }
    screen, terminal = pty.openpty()
    before, begun = os.times(), time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "moedge", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=os.environ | home,
    ) as process:
        os.close(terminal)
        shown = bool(_read(screen))
        first = time.perf_counter() - begun
        used = psutil.Process(process.pid).cpu_times()
        while shown:
            shown = bool(_read(screen))
    os.close(screen)
    ended, after = time.perf_counter() - begun, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Taken(first, used.user + used.system, ended, cpu, process.returncode)


def _read(screen: int) -> bytes:
    """What is shown next; nothing once the command has closed its terminal, which Linux reports as an error."""
    try:
        return os.read(screen, 1 << 16)
    except OSError:
        return b""


def report(command: str, runs: list[Taken]) -> None:
    first, first_cpu, ended, cpu = (
        statistics.median(values) for values in zip(*(run[:4] for run in runs), strict=True)
    )
    refused = command.startswith("refuse")
    late = "  late" if first > FIRST_S or (refused and ended > REFUSED_S) else ""
    slow = "  slow" if first_cpu > FIRST_S or (refused and cpu > REFUSED_S) else ""
    print(f"{command:19} {first:8.2f} s {first_cpu:8.2f} s {ended:8.2f} s {cpu:8.2f} s{late}{slow}", flush=True)


if __name__ == "__main__":
    main()
