"""Does a job end with the bytes of one process while workers of its Ray cluster are killed and nodes come and go?

2,000 rows of the bundled model, `--deterministic`, on a cluster of three workers: 100 random workers are killed
(SIGKILL, whatever they do), each after an equal part of the rows, and one node leaves and returns. A second job has one
node, which leaves: the cluster shrinks to nothing until it returns. The first job is in build/matrix: a run that was
interrupted resumes it, and goes on with the deaths where it was.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matrix.state import FOLDER, Part, code_key
from moedge import run_batch
from support.ray_cluster import (
    MODEL,
    OPTIONS,
    Chaos,
    cluster,
    kill_one,
    leave_and_return,
    nodes_alive,
    worker_processes,
    write_rows,
)
from support.ray_cluster import wrong as faults_of

ROWS, KILLS = 2000, 100
# In the folder of a job: how many of its deaths and changes are over.
_DONE = "deaths"


def check(folder: Path, rows: int, kills: int) -> list[str]:
    """One job whose workers are killed, against the same one in this process."""
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    print(f"SEED={seed} draws the same workers and instants again")
    generator = random.Random(seed)

    def deeds(found: Any) -> list[Callable[[], bool]]:
        killed = [kill_one(generator) for _ in range(kills)]
        leave, join = leave_and_return(found, seconds=2)
        return [*killed[: kills // 3], leave, *killed[kills // 3 : 2 * kills // 3], join, *killed[2 * kills // 3 :]]

    return _run(folder, rows, deeds, nodes=2, head_cpus=1)


def resumed(rows: int, kills: int) -> list[str]:
    """`check` in a folder that stays until it has passed with this code."""
    kept = FOLDER / f"ray-{code_key()[:16]}"
    for each in FOLDER.glob("ray-*"):
        if each.is_dir() and each != kept:
            shutil.rmtree(each)
    kept.mkdir(parents=True, exist_ok=True)
    faults = check(kept, rows, kills)
    if faults:
        # To be looked at, and not to be resumed.
        kept = kept.rename(FOLDER / f"ray-failed-{time.time():.0f}")
        return [f"{each} (in {kept})" for each in faults]
    shutil.rmtree(kept)
    return []


def temporary(job: Callable[[Path], list[str]]) -> list[str]:
    """A job in a folder for its time."""
    with tempfile.TemporaryDirectory() as folder:
        return job(Path(folder))


def shrink(folder: Path) -> list[str]:
    """The only worker goes away with its node, and another one comes."""

    def deeds(found: Any) -> list[Callable[[], bool]]:
        leave, join = leave_and_return(found, seconds=5)
        return [leave, lambda: not worker_processes() and join()]

    # The second deed comes without a row in between: nobody computes one.
    return _run(folder, 600, lambda found: [_at_once(deeds(found))], nodes=1, head_cpus=0)


def _at_once(deeds: list[Callable[[], bool]]) -> Callable[[], bool]:
    left = iter(deeds)
    current = [next(left)]

    def deed() -> bool:
        if current[0]():
            following = next(left, None)
            if following is None:
                return True
            current[0] = following
        return False

    return deed


def _run(
    root: Path, rows: int, deeds: Callable[[Any], list[Callable[[], bool]]], *, nodes: int, head_cpus: int
) -> list[str]:
    given, wanted, output, done = root / "rows.jsonl", root / "wanted.jsonl", root / "out.jsonl", root / _DONE
    if not given.exists():
        write_rows(given, rows)
    run_batch(MODEL, given, wanted, progress=False, **OPTIONS)
    with cluster(nodes, head_cpus) as found:
        planned = deeds(found)
        chaos = Chaos(output, rows, planned, kept=done)
        chaos.start()
        summary = run_batch(MODEL, given, output, progress=False, ray=found.address, **OPTIONS)
        # Before the thread ends, with which a node would end that it started.
        alive = nodes_alive(found)
        chaos.end()
    print(
        f"{chaos.done} deaths and changes, {len(summary.workers)} workers answered {summary.rows.total} rows, "
        f"{alive} of {nodes + 1} nodes alive at the end",
        flush=True,
    )
    missed = [] if chaos.done == len(planned) else [f"{chaos.done} of {len(planned)} things were done to the cluster"]
    missed += [] if alive == nodes + 1 else [f"{alive} of {nodes + 1} nodes are alive"]
    return faults_of(output, wanted) + missed


def parts(quick: bool) -> list[Part]:
    """The parts of the run."""
    if quick:
        return [Part("60 rows, 2 kills", partial(temporary, partial(check, rows=60, kills=2)))]
    return [
        Part(f"{ROWS:,} rows, {KILLS} kills, one node leaves and returns", partial(resumed, ROWS, KILLS)),
        Part("the only node leaves, and another one joins", partial(temporary, shrink)),
    ]
