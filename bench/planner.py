"""Whether plans come true: ceilings kept, predictions close, choices near the best of a grid.

    python -m bench.make_model --shape m --out models/m
    moedge doctor --disk-dir stores
    python -m bench.planner budgets --model models/m --disk-dir stores --ram 2GiB 3GiB 4GiB 5GiB 6GiB 8GiB --rows 96
    python -m bench.planner budgets --model demo --ram 740MiB 760MiB 800MiB 900MiB 1GiB 2GiB --rows 400
    python -m bench.planner grid --model demo --workload chat
    python -m bench.planner table
    python -m bench.planner speed [--against OTHER] [--profile big]

Every point is a job of its own process, those of `budgets` run twice; its numbers are lines of `planner.jsonl`
(`--results`). Points that are there are not run again, so that the work can be cut and gone on with. `table` prints
what is there. `speed` is CPU seconds of `moedge plan` on the headers of models of 120 B, of which no weight exists:
files are sparse, as large as the model, with nothing in them but headers. `--against` takes another checkout, with a
.venv of its own, one run of each in turn; `--profile` prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import pstats
import random
import statistics
import struct
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from bench import ROOT
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.formula import tensor_shapes
from support.known_shapes import GPT_OSS_120B, QWEN3_30B

# One file with a few large tensors; many files with an expert's matrices apart from each other.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt-oss-120b": (GPT_OSS_120B, 8),
    "big": (QWEN3_30B | {"num_experts": 512}, 48),
}
# Prompt and generated tokens; documents are scaled to what a point of seconds allows.
WORKLOADS = {"chat": (128, 128), "document": (2048, 64)}
GRID_TOKENS = (64, 256, 1024, 4096)
GRID_SEQUENCES = (8, 32, 128, 512)
WITHIN, AGAIN, BEST = 0.25, 0.15, 0.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("budgets", "grid", "table", "speed"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--disk-dir", type=Path)
    parser.add_argument("--ram", nargs="+", default=["1GiB"])
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--workload", choices=WORKLOADS, default="chat")
    parser.add_argument("--shorter", type=int, default=1, help="divide the workload's lengths")
    parser.add_argument("--results", type=Path, default=Path("planner.jsonl"))
    parser.add_argument("--against", type=Path, help="another checkout, for `speed`")
    parser.add_argument("--runs", type=int, default=5, help="of `speed`")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of `speed`")
    parser.add_argument("--profile", choices=MODELS)
    options = parser.parse_args()
    if options.part == "speed":
        print_speed(options)
        return
    if options.part == "table":
        print_tables(read(options.results))
        return
    for point in points(options):
        if not any(done["point"] == point for done in read(options.results)):
            with options.results.open("a") as file:
                runs = [run(point) for _ in range(2 if options.part == "budgets" else 1)]
                file.write(json.dumps({"point": point, "runs": runs}) + "\n")
            print(f"{point['model']} {point['ram']}: exit codes {[one['code'] for one in runs]}", flush=True)


def points(options: argparse.Namespace) -> list[dict[str, Any]]:
    prompt, generated = (max(1, length // options.shorter) for length in WORKLOADS[options.workload])
    common = {
        "part": options.part, "model": options.model, "disk_dir": options.disk_dir and str(options.disk_dir),
        "quant": options.quant, "rows": options.rows, "prompt": prompt, "generated": generated,
    }  # fmt: skip
    found: list[dict[str, Any]] = [{**common, "ram": ram, "tokens": None, "sequences": None} for ram in options.ram]
    if options.part == "grid":
        pairs = [(tokens, live) for tokens in GRID_TOKENS for live in GRID_SEQUENCES if live <= tokens]
        found += [{**common, "ram": options.ram[0], "tokens": tokens, "sequences": live} for tokens, live in pairs]
    return found


def run(point: dict[str, Any]) -> dict[str, Any]:
    """One job; what it learned is in a state folder of this point alone, beside the machine's profile."""
    with tempfile.TemporaryDirectory() as folder:
        rows, out, summary = (Path(folder, name) for name in ("in.jsonl", "out.jsonl", "summary.json"))
        rows.write_text("".join(json.dumps(row) + "\n" for row in job(point)))
        model = str(files("moedge.demo") / "model") if point["model"] == "demo" else point["model"]
        command = [
            sys.executable,
            "-m",
            "moedge",
            "batch",
            model,
            str(rows),
            "-o",
            str(out),
            "-q",
            "--temperature",
            "0",
        ]
        command += ["--temperature", "0", "--ram", point["ram"], "--quant", point["quant"], "--summary", str(summary)]
        for option, value in (
            ("--disk-dir", "disk_dir"),
            ("--tokens-per-pass", "tokens"),
            ("--max-sequences", "sequences"),
        ):
            command += [option, str(point[value])] if point[value] else []
        ended = subprocess.run(command, env=os.environ | state(point), capture_output=True, text=True, check=False)
        if not summary.exists():
            return {"code": ended.returncode, "said": ended.stderr[-300:]}
        told = json.loads(summary.read_text())
    return {
        "code": ended.returncode,
        "predicted": told["predicted"]["generated_tok_s"],
        "measured": told["throughput"]["generated_tok_s"],
        "seconds": told["seconds"]["generate"],
        "bottleneck": told["predicted"]["bottleneck"],
        "peak": told["memory"]["host"]["peak"],
        "budget": told["memory"]["host"]["budget"],
        "used": told["predicted"]["peak"],
        **{name: told["plan"][name] for name in ("quant", "tokens_per_pass", "max_sequences")},
        "streams": told["plan"]["held_nbytes"] < told["plan"]["weights_nbytes"],
    }


def state(point: dict[str, Any]) -> dict[str, str]:
    """The first run of a point knows no other run."""
    from platformdirs import user_state_path

    name = "-".join(str(value).replace("/", "_") for value in point.values())
    folder = Path(tempfile.gettempdir(), "planner-state", name, "moedge")
    folder.mkdir(parents=True, exist_ok=True)
    profile = user_state_path("moedge") / "machine.json"
    if profile.exists():
        (folder / profile.name).write_bytes(profile.read_bytes())
    return {"XDG_STATE_HOME": str(folder.parent)}


def job(point: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts with nothing in common, as token ids; answers of full length."""
    chosen = random.Random(point["rows"])
    return [
        {
            "id": str(row),
            "prompt": [chosen.randrange(300, 3000) for _ in range(point["prompt"])],
            "max_tokens": point["generated"],
            "ignore_eos": True,
        }
        for row in range(point["rows"])
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_tables(results: list[dict[str, Any]]) -> None:
    names = ("model", "budget", "format", "sequences", "tokens a pass", "waits for", "peak / budget", "predicted")
    print(f"| {' | '.join((*names, 'measured', 'second run'))} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    close = again = kept = total = 0
    for each in (each for each in results if each["point"]["part"] == "budgets"):
        point, (first, second) = each["point"], each["runs"]
        total += 1
        if "measured" not in first or "measured" not in second:
            print(f"| {point['model']} | {point['ram']} | exit {first['code']}: {first.get('said', '')} |" + " |" * 7)
            continue
        errors = [run["predicted"] / run["measured"] for run in (first, second)]
        close += abs(errors[0] - 1) <= WITHIN
        again += abs(errors[1] - 1) <= AGAIN
        kept += max(run["peak"] / run["budget"] for run in (first, second)) <= 1
        print(f"| {point['model']} | {point['ram']} | {first['quant']} | {first['max_sequences']} | "
              f"{first['tokens_per_pass']} | {first['bottleneck']} | {first['peak'] / first['budget']:.2f} | "
              f"{first['predicted']:.1f} | {first['measured']:.1f} ({errors[0]:.2f}) | "
              f"{second['predicted']:.1f} / {second['measured']:.1f} ({errors[1]:.2f}) |")  # fmt: skip
    print(f"\nwithin {WITHIN:.0%}: {close} of {total}; second run within {AGAIN:.0%}: {again}; ceilings kept: {kept}\n")
    _print_grids([each for each in results if each["point"]["part"] == "grid"])


def _print_grids(results: list[dict[str, Any]]) -> None:
    kinds = {(each["point"]["model"], each["point"]["prompt"], each["point"]["generated"]) for each in results}
    for kind in sorted(kinds):
        mine = [
            each for each in results if kind == tuple(each["point"][name] for name in ("model", "prompt", "generated"))
        ]
        rates = {
            (each["point"]["tokens"], each["point"]["sequences"]): max(run.get("measured", 0.0) for run in each["runs"])
            for each in mine
        }
        chosen = rates.pop((None, None), 0.0)
        best = max(rates.values(), default=0.0)
        print(f"{kind}: chosen {chosen:.1f} tok/s, best of {len(rates)} in the grid {best:.1f}: "
              f"{chosen / (best or 1):.2f} (wanted {1 - BEST:.2f} or more)")  # fmt: skip
        for (tokens, live), rate in sorted(rates.items()):
            print(f"  {tokens:>5} tokens a pass, {live:>4} sequences  {rate:9.1f}")


# --- speed


def print_speed(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if options.profile:
            print_profile(make_headers(options.profile, Path(folder)))
            return
        checkouts = {"here": ROOT} | ({"against": options.against} if options.against else {})
        compare_speed(checkouts, {name: make_headers(name, Path(folder)) for name in options.models}, options.runs)


def compare_speed(checkouts: dict[str, Path], models: dict[str, Path], runs: int) -> None:
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


def make_headers(name: str, folder: Path) -> Path:
    """A checkpoint folder in as many files as such models come in."""
    return make_checkpoint(*MODELS[name], folder / name)


def make_checkpoint(config: dict[str, Any], num_files: int, path: Path) -> Path:
    """A checkpoint folder whose files are sparse: headers, and no weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors = list(tensor_shapes(ModelConfig.read(path)).items())
    size = math.ceil(len(tensors) / num_files)
    weight_map: dict[str, str] = {}
    for begin in range(0, len(tensors), size):
        file = f"model-{begin // size + 1:05}-of-{num_files:05}.safetensors"
        weight_map |= dict.fromkeys((tensor for tensor, _ in tensors[begin : begin + size]), file)
        at, content = 0, {}
        for tensor, shape in tensors[begin : begin + size]:
            end = at + 2 * math.prod(shape)
            content[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(content).encode()
        with (path / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            opened.truncate(8 + len(text) + at)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def print_profile(model: Path) -> None:
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
