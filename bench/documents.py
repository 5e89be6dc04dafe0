"""What does reading documents take from generation, and does the memory of a job grow with its files?

    python -m bench.documents speed --model models/s [--files 96] [--max-tokens 200]
    python -m bench.documents memory --model models/toy [--files 300 30000]

`speed` asks about a folder of PDF, DOCX, PPTX, XLSX, HTML, mail and text with `moedge docs`, then again with what was
read in the cache, then the same prompts as a file with `moedge batch`, whose tokens per second are the whole.
`memory` asks about folders of small text files with one output token each: the peak resident memory of the command, and
of it with all processes that it started, sampled every 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench import ROOT
from support.document_folder import docx, pdf, pptx, xlsx

MIB = 1 << 20
_EVERY_SECONDS = 0.05
_WORDS = (
    "the",
    "invoice",
    "names",
    "a",
    "sum",
    "of",
    "euros",
    "for",
    "pens",
    "paper",
    "and",
    "work",
    "due",
    "in",
    "May",
)


def text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(_WORDS, k=words))


def _mail(words: str) -> bytes:
    return f"From: a@example.org\nTo: b@example.org\nSubject: An offer\n\n{words}\n".encode()


# Half of the folder are PDFs, as in most archives.
KINDS: tuple[tuple[str, Callable[[str], bytes]], ...] = (
    (".pdf", lambda words: pdf([words[: len(words) // 2], words[len(words) // 2 :]])),
    (".docx", lambda words: docx("A letter", words)),
    (".pdf", lambda words: pdf([words])),
    (".html", lambda words: f"<!DOCTYPE html><html><body><h1>A page</h1><p>{words}</p></body></html>".encode()),
    (".pdf", lambda words: pdf([words])),
    (".eml", _mail),
    (".pdf", lambda words: pdf([words])),
    (".xlsx", lambda words: xlsx(Costs=[["what", "sum"], [words, 12]])),
    (".pdf", lambda words: pdf([words])),
    (".pptx", lambda words: pptx(("A slide", words))),
    (".pdf", lambda words: pdf([words])),
    (".txt", lambda words: words.encode()),
)


def make_mixed(folder: Path, files: int, words: int) -> None:
    generator = random.Random(0)
    folder.mkdir()
    for number, (suffix, make) in enumerate(islice(cycle(KINDS), files)):
        (folder / f"{number:05}{suffix}").write_bytes(make(text(generator, generator.randint(words // 2, words))))


def make_small(folder: Path, files: int) -> None:
    generator = random.Random(0)
    for number in range(files):
        path = folder / f"{number // 1000:03}" / f"{number:06}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(generator, 8))


def moedge(*words: object) -> list[str]:
    return [sys.executable, "-m", "moedge", *map(str, words), "-q"]


def numbers(command: Sequence[str], summary: Path) -> dict[str, Any]:
    """The run summary of a command; of its first round, if it has rounds."""
    begun = time.perf_counter()
    subprocess.run([*command, "--summary", str(summary)], check=True, cwd=ROOT)
    found = json.loads(summary.read_bytes())
    return (found["rounds"][0] if "rounds" in found else found) | {"wall": time.perf_counter() - begun}


def speed(options: argparse.Namespace, root: Path) -> None:
    folder, cache = root / "in", root / "texts"
    make_mixed(folder, options.files, options.words)
    common = ("--ram", options.ram, "--max-tokens", options.max_tokens, "--disk-dir", root / "stores")
    asked = (*common, "--prompt", "What does it say?", "--cache", cache)
    runs = {
        "documents": numbers(moedge("docs", options.model, folder, "-o", root / "a.jsonl", *asked), root / "a.json"),
        "documents, read before": numbers(
            moedge("docs", options.model, folder, "-o", root / "b.jsonl", *asked), root / "b.json"
        ),
    }
    (rows,) = (root / "a.job" / "rounds").glob("*/0001.jsonl")
    alone = numbers(moedge("batch", options.model, rows, "-o", root / "c.jsonl", *common), root / "c.json")
    runs["the same prompts as a file"] = alone
    print(
        f"{'':28} {'rows':>5} {'tok/s':>7} {'share':>7} {'no row':>7} {'seqs':>5} {'passes':>7} {'s':>6} {'wall s':>7}"
    )
    for name, found in runs.items():
        generate, waited = found["seconds"]["generate"], found["stalls"]["rows"]
        rate = found["throughput"]["generated_tok_s"]
        share, stalled = (
            rate / alone["throughput"]["generated_tok_s"],
            "" if waited is None else f"{waited / generate:.1%}",
        )
        passes = found["passes"]
        print(
            f"{name:28} {found['rows']['total']:4} {rate:7.1f} {share:7.1%} {stalled:>7} "
            f"{passes['sequences_mean']:6.1f} {passes['count']:7} {generate:9.1f} {found['wall']:7.1f}"
        )


def tree_nbytes(root: int) -> tuple[int, int]:
    """Resident bytes of a process, and of it with everything that it has started."""
    parents, resident = dict[int, int](), dict[int, int]()
    for each in os.listdir("/proc"):
        try:
            fields = Path("/proc", each, "stat").read_text().rpartition(")")[2].split() if each.isdigit() else []
        except OSError:
            continue
        if fields:
            parents[int(each)], resident[int(each)] = int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return resident.get(root, 0), sum(nbytes for each, nbytes in resident.items() if _under(each, root, parents))


def _under(process: int, root: int, parents: dict[int, int]) -> bool:
    while process > 1:
        if process == root:
            return True
        process = parents.get(process, 0)
    return False


def memory(options: argparse.Namespace, root: Path) -> None:
    print(f"{'files':>7} {'command MiB':>12} {'with its readers MiB':>21} {'seconds':>8}")
    for count in options.files:
        make_small(root / f"in{count}", count)
        command = moedge(
            "docs", options.model, root / f"in{count}", "-o", root / f"{count}.jsonl", "--prompt", "What is it?",
            "--max-tokens", 1, "--ram", options.ram, "--max-sequences", 32, "--disk-dir", root / "stores",
        )  # fmt: skip
        begun, peaks = time.perf_counter(), (0, 0)
        process = subprocess.Popen(command, cwd=ROOT)
        while process.poll() is None:
            one, every = tree_nbytes(process.pid)
            peaks = max(peaks[0], one), max(peaks[1], every)
            time.sleep(_EVERY_SECONDS)
        if process.returncode:
            raise SystemExit(f"moedge docs failed with exit code {process.returncode}")
        seconds = time.perf_counter() - begun
        print(f"{count:7} {peaks[0] / MIB:12.0f} {peaks[1] / MIB:21.0f} {seconds:8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    speeds, memories = commands.add_parser("speed"), commands.add_parser("memory")
    for each in (speeds, memories):
        each.add_argument("--model", required=True)
        each.add_argument("--ram", default="3GiB")
    memories.add_argument("--files", type=int, nargs="+", default=[300, 30_000])
    speeds.add_argument("--files", type=int, default=96)
    speeds.add_argument("--max-tokens", type=int, default=200)
    speeds.add_argument("--words", type=int, default=80, help="most words of a document; the fewest are half of it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="documents-") as folder:
        os.environ["XDG_STATE_HOME"] = str(Path(folder, "state"))
        {"speed": speed, "memory": memory}[options.command](options, Path(folder))


if __name__ == "__main__":
    main()
