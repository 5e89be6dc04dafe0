"""What each lever is worth to a mixture several times larger than memory, in a line each, and llama.cpp beside them.

    python -m bench.make_model --shape q24 --out models/q24            # 30.7 GB in bf16
    python -m bench.night --model models/q24 --ceiling 6GiB --tree before=CHECKOUT --lever before: --lever now: \
        --lever "now:--experts int3" --llama-bin LLAMA_BIN --gguf models/q24-IQ3_S.gguf

A lever is `TREE:OPTIONS`: what `moedge batch` of a checkout does with options, `now` being this one. Its weights are
packed before anything is timed, once for all levers of a tree that pack alike. Every process has a memory cgroup of its
own, page cache included, which takes root; moedge is told 90 % of it. Without `--ceiling` there is no group, and moedge
is not told how much it may use.

llama-batched-bench computes `--parallel` rows at once, as its server does with -np; more rows take as much longer.
Tokens per second are generated ones over the whole time, prompts included. `--record FILE` adds a JSON line a process.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import string
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.compare import SHARE, json_lines, verdict
from moedge.offload.budget import GIB, parse_size
from support import memory_ceiling as ceiling
from support import page_cache
from support.memory_ceiling import Outcome

Found = dict[str, Any]


def write_rows(path: Path, count: int, options: argparse.Namespace) -> Path:
    """Prompts of random letters, each letter a token of bench.make_model's tokenizer."""
    letters = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            prompt = "".join(letters.choices(string.ascii_letters, k=options.prompt))
            print(json.dumps({"prompt": prompt, "max_tokens": options.new, "temperature": 0}), file=file)
    return path


class Night:
    """Runs levers and llama.cpp under the same ceiling; `lever` and `llama` return what a process was found to do."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._limit = parse_size(options.ceiling, 0, 0) if options.ceiling else None
        self._trees = {"now": ROOT} | {name: Path(path).resolve() for name, path in options.tree}
        self._one = write_rows(scratch / "one.jsonl", 1, options)
        self._rows = write_rows(scratch / "rows.jsonl", options.rows, options)

    def lever(self, text: str) -> Found:
        """The summary of a batch of all rows. Raises SystemExit where packing or the batch fails."""
        name, _, words = text.partition(":")
        stores, python = self._options.stores / name, self._trees[name] / ".venv/bin/python"
        out, summary = self._scratch / "out.jsonl", self._scratch / "summary.json"
        told = ["--ram", SHARE] if self._limit else []
        command = [
            str(python), "-m", "moedge", "batch", str(self._options.model), "-o", str(out), "--overwrite", "--quiet",
            "--disk-dir", str(stores), *told, *shlex.split(words),
        ]  # fmt: skip
        # One row leaves packed weights behind.
        self._run(f"packing for {text}", [*command, str(self._one)], [])
        peak = self._run(text, [*command, str(self._rows), "--summary", str(summary)], [stores]).peak_nbytes
        ran = json.loads(summary.read_text())
        return {
            "what": text, "tok_s": ran["throughput"]["generated_tok_s"], "seconds": ran["seconds"]["generate"],
            "predicted_s": ran["predicted"]["generate_s"], "passes": ran["passes"]["count"],
            "sequences": ran["passes"]["sequences_mean"], "held": ran["experts"]["held"],
            "read_gb": ran["bytes"]["disk_to_host"] / 1e9, "waited_s": ran["stalls"]["disk"],
            "peak_gib": (peak or 0) / GIB,
        }  # fmt: skip

    def llama(self, gguf: Path) -> Found:
        """Raises SystemExit where llama-batched-bench fails."""
        options, count = self._options, self._options.parallel
        command = [
            str(options.llama_bin / "llama-batched-bench"), "-m", str(gguf), "-npp", str(options.prompt), "-ntg",
            str(options.new), "-npl", str(count), "-c", str(count * (options.prompt + options.new) + 256), "-b", "2048",
            "-t", "2", "-tb", "2", "-fa", "on", "--no-repack", "-kvu", "--output-format", "jsonl",
        ]  # fmt: skip
        done = self._run(gguf.name, command, [gguf])
        (told,) = (json.loads(line) for line in json_lines(done))
        return {
            "what": gguf.name, "tok_s": count * options.new / told["t"], "seconds": told["t"] * options.rows / count,
            "sequences": count, "read_gb": done.read_nbytes * options.rows / count / 1e9,
            "peak_gib": (done.peak_nbytes or 0) / GIB,
        }  # fmt: skip

    def _run(self, what: str, command: list[str], weights: list[Path]) -> Outcome:
        page_cache.drop(page_cache.files_in(weights))
        done = ceiling.run(command, self._limit, self._options.seconds)
        if (found := verdict(done)) != "ok":
            raise SystemExit(f"{what}: {found}\n{done.err[-2000:]}")
        return done


def measure(options: argparse.Namespace) -> Iterator[Found]:
    with tempfile.TemporaryDirectory() as scratch:
        night = Night(options, Path(scratch))
        for text in options.lever:
            yield night.lever(text)
        for gguf in options.gguf:
            yield night.llama(gguf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ceiling")
    parser.add_argument("--lever", action="append", default=[], metavar="TREE:OPTIONS")
    parser.add_argument(
        "--tree", action="append", default=[], type=lambda text: text.split("=", 1), metavar="NAME=PATH"
    )
    parser.add_argument("--stores", type=Path, default=Path("stores"), help="packed weights, by tree")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--parallel", type=int, default=64, help="rows at once of llama.cpp")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--gguf", type=Path, action="append", default=[])
    parser.add_argument("--seconds", type=float, help="most that a process may take")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    ceiling.clean_up_when_told_to_end()
    print(
        "| what | tok/s | s | predicted s | passes | sequences | experts held | GB read | waited s | peak GiB | times |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    first = None
    for found in measure(options):
        first = first or found["tok_s"]
        cells = [_cell(found.get(key)) for key in COLUMNS]
        print("|", " | ".join([found["what"], *cells, f"{found['tok_s'] / first:.2f}"]), "|", flush=True)
        if options.record:
            with options.record.open("a") as file:
                at = datetime.now(UTC).isoformat(timespec="seconds")
                print(json.dumps({"at": at, "ceiling": options.ceiling, **found}), file=file)


COLUMNS = ("tok_s", "seconds", "predicted_s", "passes", "sequences", "held", "read_gb", "waited_s", "peak_gib")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


if __name__ == "__main__":
    main()
