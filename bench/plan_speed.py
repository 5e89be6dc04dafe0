"""CPU seconds of `moedge plan` on the headers of models of 120 B, of which no weight exists.

    python bench/plan_speed.py                          this checkout
    python bench/plan_speed.py --against OTHER          beside another checkout, one run of each in turn
    python bench/plan_speed.py --profile big            where the time goes

Files are sparse: as large as the model, nothing in them but headers. User and system time of the whole process.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import pstats
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support.known_shapes import GPT_OSS_120B, QWEN3_30B, headers  # noqa: E402

# One file with a few large tensors; many files with an expert's matrices apart from each other.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt-oss-120b": (GPT_OSS_120B, 8),
    "big": (QWEN3_30B | {"num_experts": 512}, 48),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, with a .venv of its own")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", choices=MODELS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.profile:
            profile(make(options.profile, Path(folder)))
            return
        checkouts = {"here": Path(__file__).parents[1]} | ({"against": options.against} if options.against else {})
        compare(checkouts, {name: make(name, Path(folder)) for name in MODELS}, options.runs)


def compare(checkouts: dict[str, Path], models: dict[str, Path], runs: int) -> None:
    jobs = {"--version": ["--version"]} | {name: ["plan", str(path)] for name, path in models.items()}
    for name, arguments in jobs.items():
        taken: dict[str, list[float]] = {checkout: [] for checkout in checkouts}
        for path in checkouts.values():
            cpu_seconds(path, arguments)
        for _ in range(runs):
            for checkout, path in checkouts.items():
                taken[checkout].append(cpu_seconds(path, arguments))
        for checkout, seconds in taken.items():
            spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
            print(f"{name:>14} {checkout:>8} {statistics.median(seconds):6.2f} s, {spread}", flush=True)


def cpu_seconds(checkout: Path, arguments: list[str]) -> float:
    command = [str(checkout / ".venv" / "bin" / "moedge"), *arguments]
    # Compiled once, as installed packages are, whatever this shell says of it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=checkout, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 4), command
    return used.ru_utime + used.ru_stime


def make(name: str, folder: Path) -> Path:
    """A checkpoint folder in as many files as such models come in."""
    config, num_files = MODELS[name]
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors = list(headers(config).items())
    size, weight_map = math.ceil(len(tensors) / num_files), {}
    for begin in range(0, len(tensors), size):
        file = f"model-{begin // size + 1:05}-of-{num_files:05}.safetensors"
        weight_map |= dict.fromkeys((tensor for tensor, _ in tensors[begin : begin + size]), file)
        at, content = 0, {}
        for tensor, entry in tensors[begin : begin + size]:
            content[tensor] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, at + entry.nbytes]}
            at += entry.nbytes
        text = json.dumps(content).encode()
        with (path / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            opened.truncate(8 + len(text) + at)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def profile(model: Path) -> None:
    from moedge.cli.main import app

    profiler = cProfile.Profile()
    sys.argv = ["moedge", "plan", str(model)]
    try:
        profiler.runcall(app)
    except SystemExit:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
