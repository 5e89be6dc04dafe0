"""moedge beside its peers: the same rows, threads and memory, each at the best of a few settings of its own.

    python -m bench.make_model --shape m --out models/m
    python -m bench.compare --model models/m --batches 1 8 32 128 [--llama-bin DIR --gguf m-Q4_0.gguf]
    python -m bench.compare --model models/m --batches 1 8 --prompt 32 --new 4 --ceiling 3GiB --offload 1GiB ...

Contenders: moedge (`--moedge none nf4 int4 int8+int8`: weights, then --compute), transformers' generate with either of
its implementations of experts, accelerate's disk offload (`--offload SIZE`, its share of memory), llama.cpp
(`--llama-bin`, where llama-batched-bench lies, `--gguf` files, `--llama-options="--no-repack"`).

`--ceiling` puts every contender in a memory cgroup of its own, page cache included and swap off, which takes root. The
files that it reads are dropped from the page cache first, or it would use pages that are charged to somebody else. What
the table says was looked up: the group's peak (of moedge also while it makes its store), `killed` where the kernel
killed in the group for want of memory, the bytes that came from disks. A row is invalid, and this command fails, where
the ceiling cannot have bound. Memory that other processes had before, such as the libraries of the interpreter that
runs this script, is not charged.

`--products` times the bare matrix products of the same passes as well (roofline.py), the roof in bfloat16.

`--record FILE --title TEXT` keeps the figures as JSON, from which `bench.picture` makes README's table and picture.

Prints a table for docs/performance.md: medians; ratios of moedge's best to the peers' best in the same phase and batch;
the share of CPU time that other processes used meanwhile. Above 0.05 a figure says little about its contender.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import ROOT
from moedge.offload.budget import GIB, parse_size
from moedge.offload.machine.hardware import find_hardware
from support import memory_ceiling as ceiling
from support import page_cache
from support.memory_ceiling import NoGroup, Outcome

Task = dict[str, Any]
Cells = dict[int, tuple[float, float]]
# Of the ceiling, what moedge is told: interpreter, page cache and the kernel's own pages take some beside its budget.
SHARE = "90%"


@dataclass(slots=True)
class Row:
    """What one contender did. `verdict` is "ok", begins with "killed", or says what went wrong: then nothing counts."""

    title: str
    cells: Cells = field(default_factory=dict)
    peak_nbytes: int = 0
    read_nbytes: int = 0
    others: float | None = None
    verdict: str = "ok"

    @property
    def valid(self) -> bool:
        return self.verdict == "ok" or self.killed

    @property
    def killed(self) -> bool:
        return self.verdict.startswith("killed")

    def shown(self, batches: list[int]) -> str:
        missing = "killed" if self.killed else "-"
        speeds = [" / ".join(map(speed, self.cells[one])) if one in self.cells else missing for one in batches]
        others = "-" if self.others is None else f"{self.others:.2f}"
        return line(
            self.title,
            [*speeds, f"{self.peak_nbytes / GIB:.3f}", f"{self.read_nbytes / 1e9:.1f}", others, self.verdict],
        )


def speed(tok_s: float) -> str:
    """Whoever reads all weights for every token makes hundredths of one a second."""
    return f"{tok_s:.0f}" if tok_s >= 100 else f"{tok_s:.1f}" if tok_s >= 1 else f"{tok_s:.3f}"


def tasks(options: argparse.Namespace) -> Iterator[Task]:
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
        yield common | {
            "contender": "llama.cpp", "model": file, "setting": options.llama_options, "binaries": options.llama_bin,
        }  # fmt: skip


def title(task: Task) -> str:
    what = [Path(task["model"]).name] if task["contender"] == "llama.cpp" else []
    return " ".join([task["contender"], *what, task["setting"]]).strip()


class Bench:
    """Runs contenders one after another, each under the ceiling, where there is one, and from files nobody has read."""

    def __init__(self, limit: int | None, seconds: float, scratch: Path) -> None:
        self._limit, self._seconds, self._scratch = limit, seconds, scratch

    def measure(self, task: Task) -> Row:
        """Raises NoGroup, before anything ran, where no memory group can be made."""
        row = Row(title(task))
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            task = task | {"scratch": scratch}
            weights = [] if task["contender"] == "products" else [Path(task["model"])]
            if task["contender"] == "moedge":
                preparing = self._run(task | {"contender": "prepare"}, weights, row)
                if row.verdict != "ok":
                    row.verdict = f"{row.verdict} while the store was made"
                    return row
                weights = [Path(json.loads(one)["reads"]) for one in json_lines(preparing)]
            timings = [json.loads(one) for one in json_lines(self._run(task, weights, row))]
        row.cells = medians(timings)
        row.others = max((one["others"] for one in timings), default=None)
        if self._limit is None:
            row.peak_nbytes = int(max((one["peak_gib"] for one in timings), default=0) * GIB)
        return row

    def _run(self, task: Task, weights: list[Path], row: Row) -> Outcome:
        files = page_cache.files_in(weights)
        command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "bench.peers.contenders", json.dumps(task)]
        if self._limit is not None:
            page_cache.drop(files)
        done = ceiling.run(command, self._limit, self._seconds)
        row.peak_nbytes = max(row.peak_nbytes, done.peak_nbytes or 0)
        row.read_nbytes = done.read_nbytes
        found = verdict(done)
        if self._limit is not None:
            # A plan that holds all weights needs no store, and preparing reads headers only.
            wanted = 0 if task["contender"] == "prepare" else page_cache.nbytes(files)
            doubts = doubt(done, self._limit, wanted, page_cache.resident_nbytes(files))
            found = f"invalid: {doubts}" if doubts else found
        row.verdict = found
        return done


def json_lines(done: Outcome) -> list[str]:
    return [line for line in done.out.splitlines() if line.startswith("{")]


def verdict(done: Outcome) -> str:
    """What the kernel counted comes first: a contender whose child was killed ends with a code of its own."""
    if done.killed:
        return "killed"
    if done.late:
        return "out of time"
    if done.code:
        said = (done.err.strip().splitlines() or ["nothing"])[-1]
        return f"exit {done.code}: {said[:200].replace('|', '/')}"
    return "ok"


def doubt(done: Outcome, limit: int, weights_nbytes: int, cached_nbytes: int) -> str:
    """Why the ceiling cannot have bound; empty where nothing speaks against it.

    `cached_nbytes` of the `weights_nbytes` are in the page cache after the run. Of weights that nobody had in memory,
    a contender that ended well has read at least what does not fit the ceiling.
    """
    peak = done.peak_nbytes or 0
    if peak > limit:
        return f"a peak of {peak / GIB:.3f} GiB is above the ceiling"
    if cached_nbytes > limit:
        return f"{cached_nbytes / GIB:.3f} GiB of its files are in the page cache, more than its group can hold"
    least = max(weights_nbytes - limit, 1 if weights_nbytes else 0)
    if verdict(done) == "ok" and done.read_nbytes < least:
        return f"{done.read_nbytes / 1e9:.2f} GB were read, and {least / 1e9:.2f} GB do not fit"
    return ""


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


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=12, help="tokens to generate for each sequence, 2 or more")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ram", help=f"moedge's --ram; auto, or {SHARE}% of a ceiling")
    parser.add_argument("--moedge", nargs="*", default=["none", "int4", "nf4", "int8+int8"])
    parser.add_argument("--transformers", nargs="*", default=["eager", "grouped_mm"])
    parser.add_argument("--products", action="store_true", help="time the bare matrix products as well")
    parser.add_argument("--offload", help="accelerate's max_memory for weights, such as 2GiB")
    parser.add_argument("--llama-bin", default="")
    parser.add_argument("--llama-options", default="", help="more options of llama-batched-bench")
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument("--ceiling", help="memory that each contender may use, such as 4GiB")
    parser.add_argument("--scratch", type=Path, default=Path(), help="where stores and offloaded weights lie meanwhile")
    parser.add_argument("--seconds", type=float, default=3600, help="most time that a contender may take")
    parser.add_argument("--record", type=Path, help="JSON file for the figures")
    parser.add_argument("--title", default="", help="what the record measured, such as 'bf16 in 3 GiB'")
    return parser


def compare(options: argparse.Namespace, limit: int | None) -> list[Row]:
    """Prints the table row by row."""
    peak = "peak GiB" if limit is None else "group's peak GiB"
    print(line("prompt / decode, tok/s", [*map(str, options.batches), peak, "read GB", "others' CPU", "verdict"]))
    print("|---" * (len(options.batches) + 5) + "|", flush=True)
    bench, rows = Bench(limit, options.seconds, options.scratch), []
    for task in tasks(options):
        rows.append(bench.measure(task))
        print(rows[-1].shown(options.batches), flush=True)
    ours, roof, peers = (
        {row.title: row.cells for row in rows if row.valid and row.title.startswith(prefixes)}
        for prefixes in ("moedge", "products", ("transformers", "accelerate", "llama.cpp"))
    )
    print(line("moedge's best / peers' best", [*ratios(ours, peers, options.batches), "", "", "", ""]))
    if roof:
        print(line("moedge's best / bare products", [*ratios(ours, roof, options.batches), "", "", "", ""]))
    return rows


def record(rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    """The figures and what they were measured on; bench/picture.py reads it."""
    return {
        "title": options.title or Path(options.model).name,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": find_hardware(options.scratch).cpu,
        "cores": os.cpu_count(),
        "ceiling": options.ceiling,
        "prompt_tokens": options.prompt,
        "generated_tokens": options.new,
        "repeats": options.repeats,
        "command": " ".join(["python -m bench.compare", *map(shlex.quote, sys.argv[1:])]),
        "contenders": [
            {
                "title": row.title,
                "verdict": row.verdict,
                "peak_bytes": row.peak_nbytes,
                "read_bytes": row.read_nbytes,
                "cpu_share_of_others": row.others,
                "tokens_per_second": {
                    str(batch): {"prompt": round(prompt, 3), "generated": round(generated, 3)}
                    for batch, (prompt, generated) in row.cells.items()
                },
            }
            for row in rows
            if row.valid
        ],
    }


def main() -> None:
    ceiling.clean_up_when_told_to_end()
    options = parser().parse_args()
    limit = None
    if options.ceiling is not None:
        limit = parse_size(options.ceiling, 0, 0)
        try:
            with ceiling.make_group(limit) as group:
                version = group.interface.version
        except NoGroup as error:
            raise SystemExit(f"--ceiling {options.ceiling} cannot be kept, and nothing was run: {error}") from error
        print(f"Ceiling: {limit / GIB:.3f} GiB by cgroups version {version}, swap off, files dropped first.\n")
    options.ram = options.ram or ("auto" if limit is None else SHARE)
    try:
        rows = compare(options, limit)
    except page_cache.StillCached as error:
        raise SystemExit(str(error)) from error
    if options.record:
        options.record.write_text(json.dumps(record(rows, options), indent=1) + "\n")
    if wrong := [f"{row.title}: {row.verdict}" for row in rows if not row.valid]:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
