"""What stops cost: a job of 1,200 rows that is stopped politely, killed, or whose journal ends at any byte, counted in
tokens that are generated and in tokens of prompts that are computed again.

The whole command answers rows with the bundled model, some of them sampled, with `--deterministic`; each process is
forked from this one, with shared counters in its engine. Polite stops are one SIGINT at a random instant, kills are
SIGKILL with a record of progress every second instead of every minute, and a power cut is a journal of which only the
first bytes are left.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from matrix.kills import MODEL, OneDay, compare
from matrix.state import Part
from moedge.offload.errors import ExitCode
from moedge.runtime.jobs import run as runs
from moedge.runtime.jobs import session as sessions
from moedge.runtime.jobs.journal.journal import Journal
from moedge.runtime.jobs.run import RowRunner
from support.killing import start

# Of which a job with a journal that is cut has the first few: each cut is a job of its own.
ROWS, ROWS_CUT, MAX_TOKENS = 1200, 120, 24
STOPS, CUTS = 10, 100
# Of generated tokens, beyond those that are needed.
WASTE = 0.02
PROGRESS_SECONDS = 1.0


@dataclass(slots=True)
class Counters:
    """Tokens that all processes generated and computed again, and those that were generated since the last record."""

    memory: mmap.mmap

    def add(self, generated: int, resumed: int) -> None:
        before = self.read()
        struct.pack_into("qqq", self.memory, 0, before[0] + generated, before[1] + resumed, before[2] + generated)

    def recorded(self) -> None:
        struct.pack_into("q", self.memory, 16, 0)

    def read(self) -> tuple[int, int, int]:
        generated, resumed, unrecorded = struct.unpack_from("qqq", self.memory, 0)
        return generated, resumed, unrecorded

    def clear(self) -> None:
        self.memory[:24] = bytes(24)


def count_tokens(counters: Counters) -> None:
    """In processes that are forked from here on."""
    finish, progress, before = RowRunner._finish, Journal.progress, [0, 0]

    def counted_finish(runner: RowRunner, sequences: Any) -> None:
        """After each pass with rows; the profile run before them is none."""
        metrics = runner._engine.metrics
        counters.add(metrics.generated_tokens - before[0], metrics.resumed_tokens - before[1])
        before[:] = metrics.generated_tokens, metrics.resumed_tokens
        finish(runner, sequences)

    def counted_progress(journal: Journal, rows: Any) -> None:
        progress(journal, rows)
        counters.recorded()

    RowRunner._finish = counted_finish  # type: ignore[method-assign]
    Journal.progress = counted_progress  # type: ignore[method-assign]


def write_rows(path: Path, count: int) -> None:
    """Every third one is sampled; lengths differ."""
    with path.open("w") as file:
        for row in range(count):
            sampled = {"temperature": 0.8, "seed": row} if row % 3 == 0 else {}
            line = {"id": f"r{row}", "prompt": f"In the beginning {row}", "max_tokens": 1 + 7 * row % MAX_TOKENS}
            file.write(json.dumps(line | sampled | {"ignore_eos": True}) + "\n")


def command(folder: Path, rows: Path) -> Callable[[], None]:
    """`moedge batch`, in a process of its own."""
    given = ("--ram", "3GiB", "--gpu-mem", "0", "--deterministic", "--max-sequences", "64", "-q")

    def work() -> None:
        from moedge.cli.main import main

        sessions.datetime = OneDay  # type: ignore[misc]
        # Background jobs of a shell ignore it, and so would this one.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["moedge", "batch", str(MODEL), str(rows), "-o", str(folder / "out.jsonl"), *given]
        try:
            main()
        except SystemExit as end:
            os._exit(int(end.code or 0))

    return work


def answers(folder: Path) -> dict[str, bytes]:
    """No row fails."""
    return {"out.jsonl": (folder / "out.jsonl").read_bytes()}


class Stopped:
    """A job that is started again and again, in a new process each time, until it is finished."""

    def __init__(self, root: Path, num_rows: int) -> None:
        self.root, self.rows = root, root / "in.jsonl"
        self.counters = Counters(mmap.mmap(-1, mmap.PAGESIZE))
        count_tokens(self.counters)
        write_rows(self.rows, num_rows)
        begun = time.perf_counter()
        self._folder("alone")
        if code := self._end(start(command(root / "alone", self.rows))):
            raise SystemExit(f"the job ended with exit code {code}")
        self.seconds = time.perf_counter() - begun
        self.needed, _, _ = self.counters.read()
        self.wanted = answers(root / "alone")

    def stopped(self, name: str, how: signal.Signals, draw: random.Random, share: float = 1.5 / STOPS) -> Iterator[int]:
        """Yields after each of STOPS stops how many tokens had no record then; then the job is finished.

        A process is stopped after at most this `share` of the time that the job takes alone.
        """
        folder, stops, lasting = self._folder(name), 0, max(0.2, share * self.seconds)
        while True:
            self.counters.recorded()
            process = start(command(folder, self.rows))
            if stops < STOPS:
                time.sleep(draw.uniform(0.1, lasting))
                os.kill(process, how)
            code = self._end(process)
            if code == 0:
                return
            if code not in (-signal.SIGKILL, ExitCode.INTERRUPTED, ExitCode.STOPPED):
                raise SystemExit(f"the job ended with exit code {code}")
            stops += 1
            yield self.counters.read()[2]

    def cut(self, saved: Path, folder: Path, nbytes: int) -> None:
        """Finishes the job of `folder` as it was `saved`, of whose journal that many bytes are left."""
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)
        os.truncate(folder / "out.job" / "journal", nbytes)
        for file in folder.glob("out*.jsonl"):
            file.unlink()
        if code := self._end(start(command(folder, self.rows))):
            raise SystemExit(f"the job ended with exit code {code}")

    def wrong(self, folder: Path) -> list[str]:
        found = compare(answers(folder), self.wanted)
        return [f"{folder.name}: {count} {name}" for name, count in found.items() if count]

    def _folder(self, name: str) -> Path:
        (self.root / name).mkdir()
        self.counters.clear()
        return self.root / name

    def _end(self, process: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def faults(what: str, seed: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        if what == "kills":
            runs.PROGRESS_SECONDS = PROGRESS_SECONDS
        num_rows = ROWS_CUT if what == "cuts" else ROWS
        job, draw = Stopped(Path(folder), num_rows), random.Random(seed)
        print(f"{num_rows} rows, {job.needed:,} tokens to generate, {job.seconds:.1f} s alone")
        return of_cuts(job, draw) if what == "cuts" else of_stops(job, what, draw)


def of_stops(job: Stopped, what: str, draw: random.Random) -> list[str]:
    unrecorded = list(job.stopped(what, signal.SIGINT if what == "stops" else signal.SIGKILL, draw))
    generated, resumed, _ = job.counters.read()
    # A polite stop records everything; a kill costs what had no record.
    allowed = job.needed * (1 + WASTE) + (sum(unrecorded) if what == "kills" else 0)
    print(
        f"{len(unrecorded)} {what}: {generated:,} tokens generated, {generated / job.needed:.4f} of those needed; "
        f"without a record at the {what}: {sum(unrecorded):,}; computed again, of prompts and answers: {resumed:,}"
    )
    wrong = [f"{generated:,} tokens generated, {allowed:,.0f} allowed"] if generated > allowed else []
    wrong += [f"only {len(unrecorded)} {what}"] if len(unrecorded) < STOPS else []
    return wrong + job.wrong(job.root / what)


def of_cuts(job: Stopped, draw: random.Random) -> list[str]:
    """The journal of a job that was stopped twice, cut at any byte behind its first record."""
    folder, saved = job.root / "cut", job.root / "saved"
    begun = (stop for stop in job.stopped("cut", signal.SIGINT, draw, 0.8) if (folder / "out.job" / "journal").exists())
    list(islice(begun, 2))
    shutil.copytree(folder, saved)
    journal = (saved / "out.job" / "journal").read_bytes()
    first, wrong = journal.index(b"\n") + 1, list[str]()
    for number in range(CUTS):
        job.cut(saved, folder, draw.randrange(first, len(journal) + 1))
        wrong += job.wrong(folder)
        print(f"\r{number + 1} cuts", end="", file=sys.stderr, flush=True)
    print(f"{CUTS} cuts of a journal of {len(journal):,} bytes, {len(wrong)} wrong")
    return wrong


def parts(quick: bool) -> Iterator[Part]:
    for what in ("stops", "kills") if quick else ("stops", "kills", "cuts"):
        yield Part(what, partial(faults, what, 0))
