"""A Ray cluster of several nodes on this machine, and the death of its workers."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.journal.state import read_state

# By default Ray gives workers the least of a busy machine.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
MODEL = Path(__file__).parents[2] / "examples" / "tiny_moe" / "model"
OPTIONS: dict[str, Any] = {
    "ram": "1GiB", "gpu_mem": 0, "deterministic": True, "quant": "none", "max_sequences": 8, "tokens_per_pass": 64,
}  # fmt: skip
_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
# A process that stands still, on a machine that does, is not dead; one that is gone refuses connections at once.
_PATIENT = {"health_check_timeout_ms": 600_000}


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    """Greedy and sampled rows, some with two answers, some that fail."""
    lines = []
    for row in range(count):
        line: dict[str, Any] = {"id": f"r{row}", "prompt": f"In the beginning {seed} {row}", "max_tokens": 1 + row % 4}
        if row % 17 == 5:
            line |= {"logit_bias": {"999999": 1}}
        lines.append(line | {"temperature": 0.9 * (row % 2), "seed": row, "n": 1 + row % 2})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@contextmanager
def cluster(nodes: int, head_cpus: int = 0) -> Iterator[Any]:
    """Nodes with one CPU each, beside a head; the program is connected to none of them yet."""
    import ray
    from ray.cluster_utils import Cluster

    head = {**_NODE, "num_cpus": head_cpus, "include_dashboard": False, "_system_config": _PATIENT}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            found.add_node(**_NODE)
        yield found
    finally:
        if ray.is_initialized():
            ray.shutdown()
        found.shutdown()


def nodes_alive(found: Any) -> int:
    """The nodes of a cluster, its head too, whose processes all run."""
    nodes = [found.head_node, *found.worker_nodes]
    return sum(not each.dead_processes() for each in nodes)


def worker_processes() -> list[psutil.Process]:
    """The processes of workers that this program's cluster runs now."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            # One that has just died has no words.
            if " ".join(process.cmdline()).startswith("ray::WorkerActor"):
                found.append(process)
    return found


class Chaos(threading.Thread):
    """While a job runs, does `deeds` in their order, each after an equal part of its rows, and counts what it did.

    The count is in the file `kept`: with a job that is resumed, the deeds that were done before are not done again.
    """

    def __init__(self, output: Path, num_rows: int, deeds: list[Callable[[], bool]], kept: Path | None = None) -> None:
        super().__init__(daemon=True)
        self.done = int(kept.read_text()) if kept is not None and kept.exists() else 0
        self._kept = kept
        self._folder = JobFolder(output.with_suffix(".job"))
        self._num_rows = num_rows
        self._deeds = deeds
        self._ended = threading.Event()

    def run(self) -> None:
        for number, deed in enumerate(self._deeds[self.done :], self.done + 1):
            # The last deeds need time, too, while rows are left.
            while self._rows() < 0.9 * number * self._num_rows / (len(self._deeds) + 1) or not deed():
                if self._ended.wait(0.2):
                    return
            self.done += 1
            if self._kept is not None:
                self._kept.write_text(str(self.done))
        # A node that this thread started ends with it.
        self._ended.wait()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _rows(self) -> int:
        return read_state(self._folder.journal).counts.rows if self._folder.begun else -1


def kill_one(generator: random.Random) -> Callable[[], bool]:
    """SIGKILL for one worker, whatever it does; False where none runs."""

    def kill() -> bool:
        processes = worker_processes()
        if not processes:
            return False
        with suppress(ProcessLookupError):
            os.kill(generator.choice(processes).pid, signal.SIGKILL)
        return True

    return kill


def leave_and_return(found: Any, seconds: float) -> list[Callable[[], bool]]:
    """A node leaves, with all of its processes, and another one joins later."""
    left: list[float] = []

    def leave() -> bool:
        found.remove_node(list(found.worker_nodes)[-1], allow_graceful=False)
        left.append(time.monotonic())
        return True

    def join() -> bool:
        if not left:
            # It left in the cluster of an earlier run.
            return True
        if time.monotonic() - left[0] < seconds:
            return False
        # Ray sets a handler of signals, which only the main thread may.
        with patch("signal.signal"):
            found.add_node(**_NODE)
        return True

    return [leave, join]


def wrong(found: Path, wanted: Path) -> list[str]:
    """What is lost, there twice, or changed in the files of a job."""
    faults = []
    for suffix in (".jsonl", ".errors.jsonl"):
        have, want = (path.with_suffix(suffix).read_text().splitlines() for path in (found, wanted))
        ids = [json.loads(line)["id"] for line in have]
        faults += [f"{each} is there twice" for each in set(ids) if ids.count(each) > 1]
        faults += [f"{each} is lost" for each in {json.loads(line)["id"] for line in want} - set(ids)]
        if have != want:
            faults.append(f"{suffix} differs in {len(set(have) ^ set(want))} lines")
    return faults
