"""Runs every benchmark once at toy size: its figures mean nothing, but it runs.

    python -m bench.toy                    all of them: less than three minutes on two cores
    python -m bench.toy quality compare    some of them

Peers that are not installed are left out, and so is what only a GPU can time. Exits 1 if a benchmark fails or prints
nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import ROOT

# Words of the command lines of each script; {model} is a tiny checkpoint, {ram} a budget that makes it stream, {out} an
# empty folder.
COMMANDS: dict[str, tuple[str, ...]] = {
    "cpu_attention": ("--sequences 384 --kv int8",),
    "cpu_experts": ("--sequences 4",),
    "link_curves": ("--models Qwen3-30B-A3B --ram 64 --gpu-mem 6GiB --sequences 64",),
    "make_model": ("--shape toy --skew --out {out}/skewed",),
    "batching": ("--rows 8 --sequences 4 --answer 4 --repeats 1",),
    "compare": (
        "--model {model} --batches 1 2 --new 3 --prompts 2x16 --repeats 1 --ram {ram} --moedge none --products "
        "--transformers {transformers} --scratch {out} --record {out}/record.json",
    ),
    "documents": (
        "speed --model {model} --files 12 --max-tokens 4 --words 12",
        "memory --model {model} --files 8",
    ),
    "experts": (
        "bytes --model {model} --stores {out} --passes 2",
        "speed --model {model} --stores {out} --ram {ram} --sequences 2 --passes 2 --warm 1",
    ),
    "first_output": ("--runs 1 --only refuse",),
    "gpu": ("budgets --out {out}/gpu.json",),
    "host_cost": ("--layers 2 --experts 16 --tokens 4 --repeats 3", "--sequences 2 4 --repeats 3"),
    "job_scale": ("--rows 300 --small 50 --seconds 0.5",),
    "kernels": ("--help",),
    "low_bits": ("--help",),
    "kv_waste": ("--rows 60 --live 8 --blocks 16 --pool 0.5",),
    "night": ("--model {model} --stores {out} --rows 4 --prompt 8 --new 4 --lever now: --lever now:--quant=int8",),
    "micro": (
        "attention --sequences 4 --context 64 --shape gpt-oss-20b --repeats 1",
        "linear --repeats 1 --shape 128 256 --strips 256",
        "pack --repeats 1 --size 256",
        "reads --folder {out} --gib 0.03125 --shard-mib 2 --rounds 1",
        "table --folder {out} --gib 0.03125 --rounds 1",
        "rows --shape 128 256 --repeats 1",
        "step --sequences 8 --vocab 4000 --passes 2",
        "beside --quant mxfp4 --rows 1 --hidden 64 --inner 64 --rounds 1 --mib 1",
        "widen --rows 64 --columns 512 --repeats 1 --only Q4_K",
    ),
    "own_files": ("--model {model} --stores {out} --ram {ram} --sequences 2 --passes 1 --rounds 1",),
    "picture": ("docs/measurements/in-memory.json --out {out}/picture.svg",),
    "ram_division": ("--ram 6GiB",),
    "planner": (
        "budgets --model demo --rows 4 --shorter 16 --results {out}/planner.jsonl",
        "table --results {out}/planner.jsonl",
        "speed --runs 1 --models gpt-oss-120b",
    ),
    "real_quality": ("weights --mixture {model} --windows 1 --questions 0 --weights none int8+int3",),
    "make_real_mixture": ("--help",),
    "real_model": ("--help",),
    "quality": ("weights --tokens 128 --window 128", "kv --tokens 128 --window 128"),
    "recurrent": (
        "--model {recurrent} --ram 2GiB --sequences 3 --passes 2 --prompts 2 --prompt 20 --repeats 1 --transformers",
    ),
    "rotate": ("--help",),
    "roofline": (
        "--model {model} --stores {out} --ram {ram} --sequences 2 --generated 6 --read 16MiB",
    ),
    "routing": ("--help",),
    "row_order": ("--help",),
    "scale": (
        "--only sequences experts --largest 64 --record {out}/scale.json --page {out}/s.html",
        "--draw --record {out}/scale.json",
    ),
    "speculation": ("--model {model} --ram {ram} --quant auto --rows 2 --max-tokens 4 --tasks story --complete",),
    "structured": ("--rows 4 --repeats 1 --max-sequences 4",),
    "throttled_link": (
        "--layers 2 --shares 0.3 --sequences 2 --rounds 1 --passes 1 --link-mbs 1000 --longest 24",
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(COMMANDS)}; all, if none is named")
    options = parser.parse_args()
    if unknown := set(options.scripts) - COMMANDS.keys():
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="toy-") as folder:
        words = make_words(Path(folder))
        begun = time.perf_counter()
        scripts = options.scripts or list(COMMANDS)
        # Most of the time is imports, which take one core.
        with ThreadPoolExecutor(2) as pool:
            passed = list(pool.map(lambda script: run_script(script, words, Path(folder)), scripts))
    print(f"{passed.count(False)} of {len(passed)} failed, {time.perf_counter() - begun:.0f} s")
    return int(not all(passed))


def run_script(script: str, words: dict[str, str], folder: Path) -> bool:
    """Its commands one after another: a later one may read what an earlier one wrote."""
    return all(run(f"{script} {arguments.format_map(words)}", folder) for arguments in COMMANDS[script])


def make_words(folder: Path) -> dict[str, str]:
    """A tiny model, half a budget for it, and what of the peers is installed."""
    out = folder / "out"
    out.mkdir()
    subprocess.run(
        [sys.executable, "-m", "bench.make_model", "--shape", "toy", "--out", str(folder / "model")],
        check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "bench.make_model", "--shape", "next-toy", "--out", str(folder / "recurrent")],
        check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    model, peers = folder / "model", "eager" if importlib.util.find_spec("accelerate") else ""
    return {
        "model": str(model),
        "recurrent": str(folder / "recurrent"),
        "ram": tight_budget(model),
        "out": str(out),
        "transformers": peers,
    }


def tight_budget(model: Path) -> str:
    """Between the least that two sequences run with and what holds all weights."""
    from moedge.runtime.plan.placement import Workload
    from moedge.runtime.plan.planner import budget_range
    from moedge.runtime.settings.settings import Settings
    from moedge.runtime.source.model_source import open_source

    with open_source(str(model)) as source:
        settings = Settings(dtype="auto", quant="none", max_sequences=2)
        smallest, whole = budget_range(source.shape, settings, Workload(2, 200))
    return f"{(smallest + whole) // 2}B"


def run(command: str, folder: Path) -> bool:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *f"bench.{command}".split()],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    passed = done.returncode == 0 and bool(done.stdout.strip())
    print(f"{'ok' if passed else 'FAILED':7}{time.perf_counter() - begun:6.1f} s  {command}", flush=True)
    if not passed:
        print(f"exit code {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
