"""moedge beside its peers: the same rows, threads and memory, each at the best of a few settings of its own.

    python bench/make_model.py --shape m --out models/m
    python bench/compare.py --model models/m --batches 1 8 32 128 [--llama-bin DIR --gguf m-Q4_0.gguf]

Contenders: moedge (`--moedge none nf4 int4 int8+int8`: weights, then --compute), transformers' generate with either of
its implementations of experts, accelerate's disk offload (`--offload SIZE`, its share of memory), llama.cpp
(`--llama-bin`, where llama-batched-bench lies, and `--gguf` files). `--ceiling` puts every contender in a memory cgroup
of its own, page cache included, which takes root.

`--products` times the bare matrix products of the same passes as well (bare_products.py), the roof in bfloat16.

Prints a table for docs/performance.md: medians; ratios of moedge's best to the peers' best in the same phase and batch;
the share of CPU time that other processes used meanwhile. Above 0.05 a figure says little about its contender.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ceiling import under_ceiling

HERE = Path(__file__).parent
Cells = dict[int, tuple[float, float]]


def tasks(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """In one order for all, so that who runs later is not who runs warmer: each reads its files once before timing."""
    common = {name: getattr(options, name) for name in ("batches", "prompt", "new", "repeats", "threads", "ram")}
    for setting in options.moedge:
        yield common | {"contender": "moedge", "model": options.model, "setting": setting}
    if options.products:
        yield common | {"contender": "products", "model": options.model, "setting": "alone", "repeats": 1}
    for setting in options.transformers:
        yield common | {"contender": "transformers", "model": options.model, "setting": setting}
        if options.offload:
            yield common | {
                "contender": "accelerate", "model": options.model, "setting": setting, "ram": options.offload,
            }  # fmt: skip
    for file in options.gguf:
        yield common | {"contender": "llama.cpp", "model": file, "setting": "", "binaries": options.llama_bin}


def run(task: dict[str, Any], ceiling: str | None) -> list[dict[str, float]]:
    """The timings of a contender; those before it failed, with what it said last, where it did."""
    command = [sys.executable, str(HERE / "contenders.py"), json.dumps(task)]
    done = subprocess.run(under_ceiling(command, ceiling), capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        print(f"{title(task)}: exit {done.returncode}, {said[:300]}", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def title(task: dict[str, Any]) -> str:
    what = Path(task["model"]).name if task["contender"] == "llama.cpp" else task["setting"]
    return f"{task['contender']} {what}"


def medians(timings: list[dict[str, float]]) -> Cells:
    by_batch: dict[int, list[dict[str, float]]] = defaultdict(list)
    for timing in timings:
        by_batch[int(timing["batch"])].append(timing)
    return {
        batch: (
            statistics.median(one["prompt_tok_s"] for one in found),
            statistics.median(one["decode_tok_s"] for one in found),
        )
        for batch, found in by_batch.items()
    }


def line(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def ratios(ours: dict[str, Cells], others: dict[str, Cells], batches: list[int]) -> list[str]:
    """The best of ours over the best of the others, prompt / decode."""
    cells = []
    for batch in batches:
        pair = []
        for phase in (0, 1):
            best = [
                max((found[batch][phase] for found in side.values() if batch in found), default=0.0)
                for side in (ours, others)
            ]
            pair.append(f"{best[0] / best[1]:.2f}" if all(best) else "-")
        cells.append(" / ".join(pair))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=12, help="tokens to generate for each sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ram", default="auto", help="moedge's --ram")
    parser.add_argument("--moedge", nargs="*", default=["none", "int4", "nf4", "int8+int8"])
    parser.add_argument("--transformers", nargs="*", default=["eager", "grouped_mm"])
    parser.add_argument("--products", action="store_true", help="time the bare matrix products as well")
    parser.add_argument("--offload", help="accelerate's max_memory for weights, such as 2GiB")
    parser.add_argument("--llama-bin", default="")
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument("--ceiling", help="memory that each contender may use, such as 4GiB")
    options = parser.parse_args()
    results: dict[str, Cells] = {}
    print("| prompt / decode, tok/s | " + " | ".join(map(str, options.batches)) + " | peak GiB | others' CPU |")
    print("|---" * (len(options.batches) + 3) + "|")
    for task in tasks(options):
        timings = run(task, options.ceiling)
        cells = results[title(task)] = medians(timings)
        shown = [
            f"{cells[batch][0]:.0f} / {cells[batch][1]:.1f}" if batch in cells else "-" for batch in options.batches
        ]
        peak = max((one["peak_gib"] for one in timings), default=0.0)
        others = max((one["others"] for one in timings), default=0.0)
        print(line(title(task), [*shown, f"{peak:.1f}", f"{others:.2f}"]), flush=True)
    ours, roof, peers = ({name: found for name, found in results.items() if name.startswith(prefixes)} for prefixes in (
        "moedge", "products", ("transformers", "accelerate", "llama.cpp"),
    ))  # fmt: skip
    print(line("moedge's best / peers' best", [*ratios(ours, peers, options.batches), "", ""]))
    if roof:
        print(line("moedge's best / bare products", [*ratios(ours, roof, options.batches), "", ""]))


if __name__ == "__main__":
    main()
