"""What does reading documents first cost a job, and does the memory of a job grow with its files?

    python -m bench.documents speed --model models/s [--files 64] [--max-tokens 200] [--turns 3]
    python -m bench.documents memory --model models/toy [--files 300 30000]

`speed` reads a folder of PDF, DOCX, PPTX, XLSX, HTML, mail and text, and answers a row about each file by `moedge
docs` with what was read in its cache: the share of reading is the most that an overlap with generation could save.
`memory` asks about folders of small text files with few output tokens each: the peak resident memory of the command,
and of it with all processes that it started, sampled every 50 ms.
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
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from bench import ROOT
from moedge import iter_documents
from moedge.offload.errors import ExitCode
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


def speed(options: argparse.Namespace, root: Path) -> None:
    folder, shares = root / "in", list[float]()
    make_mixed(folder, options.files, options.words)
    limits = ("--ram", options.ram, "--max-sequences", options.sequences, "--max-tokens", options.max_tokens)
    for turn in range(options.turns):
        cache, out, begun = root / f"texts{turn}", root / f"{turn}.jsonl", time.perf_counter()
        for _ in iter_documents(folder, cache=cache):
            pass
        reading, summary = time.perf_counter() - begun, out.with_suffix(".json")
        asked = (*limits, "--prompt", "What does it say?", "--disk-dir", root / "stores", "--cache", cache)
        command = moedge("docs", options.model, folder, "-o", out, *asked, "--summary", summary)
        code = subprocess.run(command, check=False, cwd=ROOT).returncode
        if code not in (ExitCode.OK, ExitCode.SOME_ROWS_FAILED):
            raise SystemExit(f"{' '.join(command)} failed with exit code {code}")
        found = json.loads(summary.read_bytes())["rounds"][0]
        generating, tokens = found["seconds"]["generate"], found["tokens"]["generated"]
        shares.append(reading / (reading + generating))
        print(
            f"turn {turn + 1}: {options.files} files read in {reading:.1f} s, {tokens:,} tokens generated in "
            f"{generating:.1f} s: reading is {shares[-1]:.1%}", flush=True,
        )  # fmt: skip
    print(f"reading first is {median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%}) of both")


def tree_nbytes(root: int) -> tuple[int, int]:
    """Resident bytes of a process, and of it with everything that it has started.

    A child that runs nothing of its own yet has its parent's memory, and is not counted again.
    """
    parents, resident = dict[int, int](), dict[int, int]()
    for each in os.listdir("/proc"):
        try:
            fields = Path("/proc", each, "stat").read_text().rpartition(")")[2].split() if each.isdigit() else []
        except OSError:
            continue
        if fields:
            parents[int(each)], resident[int(each)] = int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    everyone = (each for each in resident if _under(each, root, parents))
    started = (each for each in everyone if each != root and _command(each) != _command(parents[each]))
    one = resident.get(root, 0)
    return one, one + sum(resident[each] for each in started)


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


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
            "--max-tokens", options.max_tokens, "--ram", options.ram, "--max-sequences", 32,
            "--disk-dir", root / "stores",
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
    memories.add_argument("--max-tokens", type=int, default=8)
    speeds.add_argument("--files", type=int, default=64)
    speeds.add_argument("--sequences", type=int, default=32, help="rows at a time")
    speeds.add_argument("--turns", type=int, default=3)
    speeds.add_argument("--max-tokens", type=int, default=200)
    speeds.add_argument("--words", type=int, default=80, help="most words of a document; the fewest are half of it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="documents-") as folder:
        os.environ["XDG_STATE_HOME"] = str(Path(folder, "state"))
        {"speed": speed, "memory": memory}[options.command](options, Path(folder))


if __name__ == "__main__":
    main()
