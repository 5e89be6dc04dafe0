"""Does work that is killed again and again end with the bytes of work that was left alone?

Jobs: a process answers rows and is killed (SIGKILL) at a random instant; then it starts again, until the job is
finished. The finished files are compared with those of an uninterrupted run, byte by byte. First with the fake engine
of the tests, whose passes cost nothing, so that kills fall into the journal, the exports and the restarts; then with
the bundled model, `--deterministic`, rows sampled with seeds. Preparations: a process prepares the demo model; what a
kill left must not open, or be whole. With 0 failures of N the rate is below 3/N with 95 % confidence.
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
from datetime import datetime
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from matrix.state import Part
from moedge.offload.errors import BadStore
from moedge.offload.store.manifest import MANIFEST
from moedge.offload.store.store import Store
from moedge.runtime.jobs import job as states
from moedge.runtime.jobs import job_plan, lifecycle
from moedge.runtime.jobs import request as requests
from moedge.runtime.jobs import session as ledger
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.journal.state import JournalScan, read_state
from moedge.runtime.jobs.request import BatchRequest
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.settings.settings import Budgets, Settings
from moedge.runtime.source.model_source import open_source
from support.jobs import fake_engine
from support.killing import finish, killed, start

MODEL = Path(__file__).parents[2] / "examples" / "tiny_moe" / "model"
FAKED = [(states, name) for name in ("Tokenizer", "summarise", "with_workload", "expert_use")] + [
    (lifecycle, name)
    for name in ("plan_job", "load_engine", "load_with_fallback", "FallbackPolicy", "rehearse", "store_for")
] + [(ledger, "open_source"), (requests, "_model"), (job_plan, "refuse_too_small")]  # fmt: skip


class OneDay(datetime):
    """Every job begins at the same second: `created` is in the answers, and is no difference."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime(2026, 1, 1, 12, tzinfo=tz)


def write_rows(path: Path, count: int, max_tokens: int) -> None:
    """Rows of every form, greedy and sampled, some of which fail."""
    lines: list[dict[str, Any]] = []
    for row in range(count):
        length = 1 + (7 * row) % max_tokens
        body = {"max_tokens": length, "temperature": 0.9 * (row % 2), "seed": row}
        if row % 10 == 7:
            lines.append({"id": f"r{row}", "prompt": "odd", "tools": [1]})
        elif row % 3:
            lines.append({"id": f"r{row}", "prompt": f"In the beginning {row}", "n": 1 + row % 2, **body})
        else:
            chat = {"messages": [{"role": "user", "content": f"Say {row}"}], **body}
            lines.append({"custom_id": f"r{row}", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def left_behind(folder: JobFolder) -> str:
    """Where the kill fell, in the words of the final table."""
    if not folder.begun:
        return "before the first record"
    with folder.journal.open("rb") as file:
        scan = JournalScan(file)
        for _ in scan:
            pass
    if scan.torn_nbytes:
        return "inside a record"
    state = read_state(folder.journal)
    if state.finished:
        return "after the export" if state.exported else "between the last answer and the export"
    return "between answers" if state.counts.rows else "before the first answer"


def outputs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("out.jsonl", "out.errors.jsonl")}


def compare(found: dict[str, bytes], wanted: dict[str, bytes]) -> Counter[str]:
    """Rows that are lost, there twice, or not what they should be."""
    wrong: Counter[str] = Counter()
    for name, data in wanted.items():
        have, want = Counter(found[name].splitlines()), Counter(data.splitlines())
        ids = Counter(_id(line) for line in have.elements())
        wrong["duplicated"] += sum(count - 1 for count in ids.values())
        wrong["lost"] += len({_id(line) for line in want} - set(ids))
        wrong["changed"] += len([line for line in have - want if _id(line) in {_id(each) for each in want}])
        wrong["files that differ"] += found[name] != data
    return wrong


def _id(line: bytes) -> str:
    row = json.loads(line)
    return str(row.get("id") if "custom_id" not in row else row["custom_id"])


def run(root: Path, request: Callable[[Path], BatchRequest], kills: int, seed: int) -> Counter[str]:
    """Kills jobs one after the other until there were `kills` kills; prints what happened, returns what was wrong."""
    generator, left, wrong, jobs = random.Random(seed), Counter[str](), Counter[str](), 0
    (root / "alone").mkdir()
    begun = time.perf_counter()
    finish(lambda: fake_engine.run(request(root / "alone")))
    seconds = time.perf_counter() - begun
    wanted = outputs(root / "alone")
    while left.total() < kills:
        folder = root / str(jobs)
        folder.mkdir()
        work = partial(fake_engine.run, request(folder))
        # Short lives, so that one job takes many.
        while left.total() < kills and killed(work, generator.uniform(0, 0.6 * seconds)):
            left[left_behind(JobFolder(folder / "out.job"))] += 1
        finish(work)
        wrong += compare(outputs(folder), wanted)
        jobs += 1
        print(f"\r{jobs} jobs, {left.total()} kills", end="", file=sys.stderr, flush=True)
    print(f"{kills} kills of {jobs} jobs, each of which takes {seconds:.2f} s alone; the kills fell")
    for what, times in left.most_common():
        print(f"  {times:5}  {what}")
    print(f"  rows lost {wrong['lost']}, duplicated {wrong['duplicated']}, changed {wrong['changed']}; "
          f"files that differ from an uninterrupted run {wrong['files that differ']}")  # fmt: skip
    return wrong


def run_fake(root: Path, kills: int, seed: int, rows: int = 120) -> Counter[str]:
    real = [(module, name, getattr(module, name)) for module, name in FAKED]
    write_rows(root / "in.jsonl", rows, max_tokens=24)
    fake_engine.install(lambda: fake_engine.FakeEngine(pass_seconds=0.001))
    try:
        return run(root, lambda folder: BatchRequest("fake", root / "in.jsonl", folder / "out.jsonl"), kills, seed)
    finally:
        for module, name, value in real:
            setattr(module, name, value)


def run_model(root: Path, kills: int, seed: int, rows: int = 24) -> Counter[str]:
    write_rows(root / "in.jsonl", rows, max_tokens=40)
    settings = Settings(deterministic=True, max_sequences=8)
    return run(
        root,
        lambda folder: BatchRequest(str(MODEL), root / "in.jsonl", folder / "out.jsonl", settings=settings),
        kills,
        seed,
    )


# --- preparations


def prepare_demo(folder: Path) -> None:
    """Prepares the demo model."""
    with as_file(files("moedge.demo")) as demo, open_source(str(demo / "model")) as source:
        prepare(source, folder, "nf4", "bf16", Budgets().on_cpu())


def store_left_behind(folder: Path) -> str:
    """What the kill left: the words of the final table. A store that opens must be whole."""
    try:
        with Store.open(folder) as store:
            if not all(sound for _, sound in store.verify()):
                raise SystemExit(f"{folder}: a store opened that is not whole")
        return "a whole store"
    except BadStore:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if any(name.endswith(".tmp") for name in names):
        return "a file half written"
    return "finished files" if len(names) > 1 else "nothing"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def seconds_alone(folder: Path) -> float:
    """How long it takes until the store is whole; what a preparation measures after that is not what is killed."""
    begin = time.perf_counter()
    process, ended, status = start(partial(prepare_demo, folder)), 0, 0
    while not ended and not (folder / MANIFEST).exists():
        ended, status = os.waitpid(process, os.WNOHANG)
        time.sleep(0.002)
    seconds = time.perf_counter() - begin
    if status or (not ended and os.waitpid(process, 0)[1]):
        raise SystemExit("a process failed")
    return seconds


def run_preparations(root: Path, kills: int, seed: int) -> None:
    """Raises SystemExit where a store was not as it should be; prints what the kills left."""
    generator, left, finished = random.Random(seed), Counter[str](), 0
    seconds = min(seconds_alone(root / f"alone-{trial}") for trial in range(5))
    wanted = snapshot(root / "alone-0")
    while left.total() < kills:
        folder = root / f"{finished}"
        work = partial(prepare_demo, folder)
        # Lives that may be too short for a whole store: every part of the work is interrupted, and gone on with.
        while left.total() < kills and killed(work, generator.uniform(0, seconds)):
            left[found := store_left_behind(folder)] += 1
            if found == "a whole store":
                break
        finish(work)
        if snapshot(folder) != wanted:
            raise SystemExit(f"{folder} differs from a store that was written without a kill")
        finished += 1
    if left["a whole store"] == kills:
        raise SystemExit("no kill fell into the writing of a store, so they show nothing")
    print(f"{kills} kills over {seconds:.2f} s of preparing; {finished} stores ended with the same bytes; kills left")
    for what, times in left.most_common():
        print(f"  {times:4}  {what}")


# --- the run


# Kills of a part: few enough that an interrupted run loses little.
JOB_KILLS, MODEL_KILLS, PREPARE_KILLS, PARTS = 300, 60, 60, {"job": 10, "model": 5, "prepare": 5}
# Preparations are stopped at every system call by tests/offload/store/test_crash.py.
QUICK_JOB_KILLS = 20


def parts(quick: bool) -> Iterator[Part]:
    """3,000 kills of jobs with the fake engine, 300 with the demo model, 300 of preparations; each part has a seed."""
    ledger.datetime = OneDay  # type: ignore[misc]
    if quick:
        yield Part(f"job, {QUICK_JOB_KILLS} kills", partial(faults, "job", QUICK_JOB_KILLS, 0))
        return
    for what, kills in (("prepare", PREPARE_KILLS), ("job", JOB_KILLS), ("model", MODEL_KILLS)):
        for seed in range(PARTS[what]):
            yield Part(f"{what}, {kills} kills, seed {seed}", partial(faults, what, kills, seed))


def faults(what: str, kills: int, seed: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        if what == "prepare":
            try:
                run_preparations(Path(folder), kills, seed)
            except SystemExit as error:
                return [str(error)]
            return []
        wrong = (run_fake if what == "job" else run_model)(Path(folder), kills, seed)
    return [f"{count} {name}" for name, count in wrong.items() if count]
