"""Does a job that is killed again and again end with the bytes of one that was left alone?

    python bench/kill.py [--kills 3000] [--model-kills 300] [--seed 0]

A process answers rows and is killed (SIGKILL) at a random instant; then it starts again, until the job is finished. The
finished files are compared with those of an uninterrupted run, byte by byte. First with the fake engine of the tests,
whose passes cost nothing, so that kills fall into the journal, the exports and the restarts; then with the bundled
model, `--deterministic`, rows sampled with seeds. With 0 failures of N the rate is below 3/N with 95 % confidence.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "jobs"))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import fake_engine
from killing import finish, killed

from moedge.runtime.jobs import job as states
from moedge.runtime.jobs import request as requests
from moedge.runtime.jobs import session as ledger
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.journal.record import JournalScan
from moedge.runtime.jobs.journal.state import read_state
from moedge.runtime.jobs.request import BatchRequest
from moedge.runtime.settings.settings import Settings

MODEL = Path(__file__).parents[1] / "examples" / "tiny_moe" / "model"
FAKED = [(states, name) for name in (
    "plan_job", "load_engine", "load_with_fallback", "FallbackPolicy", "Tokenizer", "rehearse",
    "store_for", "summarise",
)] + [(ledger, "open_source"), (requests, "_model")]  # fmt: skip


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


def main(kills: int, model_kills: int, seed: int) -> int:
    """The exit code: 1 when a single row was wrong."""
    wrong = Counter[str]()
    ledger.datetime = OneDay  # type: ignore[misc]
    for count, runner in ((kills, run_fake), (model_kills, run_model)):
        if count:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["XDG_STATE_HOME"] = folder
                wrong += runner(Path(folder), count, seed)
    return int(wrong.total() > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3000)
    parser.add_argument("--model-kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(main(arguments.kills, arguments.model_kills, arguments.seed))
