"""Does a job end with the bytes of one process while workers of its Ray cluster are killed and nodes come and go?

2,000 rows of the bundled model in ten parts, `--deterministic`, on a cluster of three workers: each part kills ten
random workers (SIGKILL, whatever they do), and one node leaves and returns. A last part has one node, which leaves: the
cluster shrinks to nothing until it returns.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from matrix.state import Part
from moedge import run_batch
from support.ray_cluster import MODEL, OPTIONS, Chaos, cluster, kill_one, leave_and_return, worker_processes, write_rows
from support.ray_cluster import wrong as faults_of

NUM_PARTS, ROWS, KILLS = 10, 200, 10


def check(number: int, rows: int, kills: int) -> list[str]:
    """One job whose workers are killed, against the same one in this process."""
    generator = random.Random(number)

    def deeds(found: Any) -> list[Callable[[], bool]]:
        killed = [kill_one(generator) for _ in range(kills)]
        leave, join = leave_and_return(found, seconds=2)
        return [*killed[: kills // 3], leave, *killed[kills // 3 : 2 * kills // 3], join, *killed[2 * kills // 3 :]]

    return _run(number, rows, deeds, nodes=2, head_cpus=1)


def shrink() -> list[str]:
    """The only worker goes away with its node, and another one comes."""

    def deeds(found: Any) -> list[Callable[[], bool]]:
        leave, join = leave_and_return(found, seconds=5)
        return [leave, lambda: not worker_processes() and join()]

    # The second deed comes without a row in between: nobody computes one.
    return _run(99, 40, lambda found: [_at_once(deeds(found))], nodes=1, head_cpus=0)


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
    number: int, rows: int, deeds: Callable[[Any], list[Callable[[], bool]]], *, nodes: int, head_cpus: int
) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_rows(root / "rows.jsonl", rows, number)
        wanted, output = root / "wanted.jsonl", root / "out.jsonl"
        run_batch(MODEL, root / "rows.jsonl", wanted, progress=False, **OPTIONS)
        with cluster(nodes, head_cpus) as found:
            planned = deeds(found)
            chaos = Chaos(output, rows, planned)
            chaos.start()
            summary = run_batch(MODEL, root / "rows.jsonl", output, progress=False, ray=found.address, **OPTIONS)
            chaos.end()
        print(f"{chaos.done} deaths and changes, {len(summary.workers)} workers answered", flush=True)
        missed = (
            [] if chaos.done == len(planned) else [f"{chaos.done} of {len(planned)} things were done to the cluster"]
        )
        return faults_of(output, wanted) + missed


def parts(quick: bool) -> list[Part]:
    """The parts of the run."""
    if quick:
        return [Part("24 rows, 2 kills", partial(check, 0, 24, 2))]
    killed = [
        Part(f"{ROWS} rows, {KILLS} kills: {each}", partial(check, each, ROWS, KILLS)) for each in range(NUM_PARTS)
    ]
    return [*killed, Part("one node leaves and returns", shrink)]
