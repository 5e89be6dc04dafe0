"""Does a job over documents that is killed again and again end with the bytes of one that was left alone?

A folder of 300 files of all types, damaged, encrypted, empty, huge, under wrong suffixes and odd names, is asked about
with the stand-in engine of the tests, whose passes cost nothing, and with the bundled model, `--deterministic`. The
process is killed (SIGKILL) at random instants: while files are read, while rows run beside that, between rounds, while
the output is written. Every file must be in the output exactly once, and the final files must be those of a job that
nobody killed, byte by byte. With the stand-in, jobs of odd seeds share what was read.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from matrix.kills import MODEL, OneDay
from matrix.state import Part
from moedge.apps.documents.run import DocumentsObserver, documents_request, run_documents_job
from moedge.runtime.jobs import session
from support.document_folder import make_many
from support.jobs.documents_oracle import install
from support.killing import finish, killed

FILES, KILLS, PARTS = 300, 20, 5
MODEL_FILES, MODEL_KILLS, QUICK_FILES, QUICK_KILLS = 60, 10, 60, 3
# Texts of many chunks, whose answers are merged in several levels.
_LONG_NBYTES, _MODEL_LONG_NBYTES = 60_000, 8_000
_OPTIONS: dict[str, Any] = {"prompt": "Which facts?", "deterministic": True, "ram": "2GiB", "workers": 2}
_STAND_IN = {"max_tokens": 600, "chunk_tokens": 1500}
_MODEL = {"max_tokens": 6, "chunk_tokens": 128}

Work = Callable[[Path, Path], None]


def ask_model(folder: Path, out: Path) -> None:
    run_documents_job(documents_request(str(MODEL), folder, out, _OPTIONS | _MODEL), DocumentsObserver())


def ask_stand_in(folder: Path, out: Path, cache: Path | None = None) -> None:
    """For a process of its own, which it changes for good."""
    install()
    options = _OPTIONS | _STAND_IN | {"cache": cache}
    run_documents_job(documents_request("fake", folder, out, options), DocumentsObserver())


def left_behind(job: Path) -> str:
    """Where the kill fell, in the words of the final table."""
    rounds = sorted((job / "rounds").glob("*/????.jsonl"))
    if not rounds:
        return "before the first row was known"
    if not any((job / "rounds").glob("*/*.job/journal")):
        return "before the first record"
    if len(rounds) > 1:
        return "in a round of merges" if not (job / "published.json").exists() else "behind the output"
    return "behind the chunks" if (job / "documents.jsonl").exists() else "while chunks ran, or files were read"


def outputs(out: Path) -> tuple[bytes, bytes]:
    return out.read_bytes(), out.with_suffix(".errors.jsonl").read_bytes()


def unaccounted(found: tuple[bytes, bytes], wanted: dict[str, str]) -> list[str]:
    """Files that are missing, there twice, or not what they should be."""
    rows = [json.loads(line) for each in found for line in each.splitlines()]
    times = Counter(row["source"] for row in rows)
    wrong = [f"{name!a}: {times[name]} rows" for name in wanted.keys() | times.keys() if times[name] != 1]
    for row in rows:
        code = row.get("error", {}).get("code", "")
        if code.startswith("document_") and code != wanted.get(row["source"]):
            wrong.append(f"{row['source']!a}: {code}, wanted {wanted.get(row['source'])!r}")
        if not code and wanted.get(row["source"]):
            wrong.append(f"{row['source']!a}: answered, wanted {wanted[row['source']]}")
    return wrong


def run(root: Path, ask: Work, files: int, kills: int, long_nbytes: int, seed: int) -> list[str]:
    """Kills jobs one after the other until there were `kills` kills; prints where they fell, returns what was wrong."""
    generator, left, jobs, faults = random.Random(seed), Counter[str](), 0, list[str]()
    folder = root / "in"
    folder.mkdir()
    wanted = make_many(folder, root / "outside", files, long_nbytes)
    begun = time.perf_counter()
    finish(partial(ask, folder, root / "whole.jsonl"))
    seconds, whole = time.perf_counter() - begun, outputs(root / "whole.jsonl")
    faults += unaccounted(whole, wanted)
    while left.total() < kills:
        out = root / f"job{jobs}.jsonl"
        while left.total() < kills and killed(partial(ask, folder, out), generator.uniform(0, 0.5 * seconds)):
            left[left_behind(out.with_suffix(".job"))] += 1
            print(f"\r{jobs} jobs, {left.total()} kills", end="", file=sys.stderr, flush=True)
        finish(partial(ask, folder, out))
        if outputs(out) != whole:
            faults.append(f"{out.name} differs from the output of a job that nobody killed")
        jobs += 1
    print(f"{len(wanted)} files, {kills} kills of {jobs} jobs, each of which takes {seconds:.1f} s alone; they fell")
    for what, times in left.most_common():
        print(f"  {times:5}  {what}")
    return faults


def parts(quick: bool) -> Iterator[Part]:
    """10 kills with the model and 100 with the stand-in; quick, three with the stand-in in a small folder."""
    session.datetime = OneDay  # type: ignore[misc]
    if not quick:
        name = f"model, {MODEL_FILES} files, {MODEL_KILLS} kills"
        yield Part(name, partial(faults, "model", MODEL_FILES, MODEL_KILLS, 0))
    for seed in range(1 if quick else PARTS):
        files, kills = (QUICK_FILES, QUICK_KILLS) if quick else (FILES, KILLS)
        yield Part(
            f"stand-in, {files} files, {kills} kills, seed {seed}", partial(faults, "stand-in", files, kills, seed)
        )


def faults(what: str, files: int, kills: int, seed: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        if what == "model":
            return run(Path(folder), ask_model, files, kills, _MODEL_LONG_NBYTES, seed)
        cache = Path(folder, "texts") if seed % 2 else None
        return run(Path(folder), partial(ask_stand_in, cache=cache), files, kills, _LONG_NBYTES, seed)
