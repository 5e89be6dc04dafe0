"""The workers of a job on a Ray cluster: started, called, and started again where they died.

Ray starts them where there is space, carries calls and answers, and notices deaths. Here is what that means for a job.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ...face import counted, stage
from .actor import Refused, WorkerActor, post_mortem
from .address import LOCAL, connect, import_ray
from .worker import LoadReport, WorkerInfo

# Ray takes seconds to start a process; after this time without a worker, a line says what is missing.
PATIENCE_SECONDS = 20.0
# Between two looks at what the cluster has.
_LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """`workers` are started, each with `cpus` and `gpus` of Ray's; up to `share` of them are on one machine."""

    workers: int
    cpus: int
    gpus: int
    share: int

    @classmethod
    def of(cls, nodes: list[Mapping[str, Any]], wanted: int | None, use_gpus: bool) -> ClusterSize:
        """One worker for every GPU that Ray offers, else for every node, with equal parts of the smallest one's CPUs.

        `nodes` are as of `ray.nodes()`. `wanted` workers may be more than there is space for now: Ray starts them when
        nodes join.
        """
        found = [each["Resources"] for each in nodes if each["Alive"] and each["Resources"].get("CPU", 0) >= 1]
        with_gpus = [each for each in found if each.get("GPU", 0) >= 1] if use_gpus else []
        each_has = [int(each["GPU"]) for each in with_gpus] or [1] * len(found)
        workers = wanted or max(1, sum(each_has))
        most = max(-(-workers // max(1, len(each_has))), *each_has) if each_has else 1
        cpus = min((int(each["CPU"]) for each in with_gpus or found), default=1)
        machines = [each["NodeManagerAddress"] for each in nodes if each["Alive"]]
        beside = max((machines.count(each) for each in machines), default=1) if len(found) > 1 else 1
        return cls(workers, max(1, cpus // most), int(bool(with_gpus)), min(workers, most * beside))

    @property
    def needs(self) -> str:
        """What Ray must have free on one node for a worker."""
        return counted(self.cpus, "CPU") + (f" and {counted(self.gpus, 'GPU')}" if self.gpus else "")

    def fits(self, resources: Mapping[str, float]) -> int:
        """How many workers these resources of a node are enough for."""
        found = int(resources.get("CPU", 0) // self.cpus)
        return min(found, int(resources.get("GPU", 0) // self.gpus)) if self.gpus else found

    def without_space(self, nodes: list[Mapping[str, Any]]) -> str:
        """A sentence where some workers must wait for nodes; "" where all have space."""
        space = sum(self.fits(each["Resources"]) for each in nodes if each["Alive"])
        if not 0 < space < self.workers:
            return ""
        return (
            f"the cluster has space for {space} of {counted(self.workers, 'worker')} ({self.needs} each); the others "
            "start when nodes join"
        )

    def lack(self, nodes: list[Mapping[str, Any]], free: Mapping[str, float], last_words: str) -> str:
        """Why no worker starts, and what to do. `free` is as of `ray.available_resources()`."""
        if not any(self.fits(each["Resources"]) for each in nodes if each["Alive"]):
            return (
                f"no worker can start: each takes {self.needs} of one node, and no node of the cluster has them. The "
                "job waits; `ray start` adds a node, Ctrl-C stops"
            )
        if not self.fits(free):
            return (
                f"no worker runs yet: each takes {self.needs}, and the cluster's are all used, by others or by workers "
                "that are starting. The job waits; `ray status` shows what is used, `ray start` adds a node, Ctrl-C "
                "stops"
            )
        words = f" The last one ended before it began: {last_words}." if last_words else ""
        return (
            f"no worker has started yet, although {self.needs} of the cluster are free: a machine is busy, or its "
            f"memory is nearly full, when Ray ends workers.{words} The job waits; Ctrl-C stops"
        )


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """One worker. `ref` is what it was asked for, and `then` takes the answer; `dead` ones are examined."""

    number: int
    actor: Any
    info: WorkerInfo | None = None
    node: str = ""
    ref: Any = None
    then: Callable[[WorkerSlot, Any], None] | None = None
    dead: bool = False
    loaded: LoadReport | None = None

    @property
    def idle(self) -> bool:
        return self.info is not None and self.ref is None


class Owner(Protocol):
    """Whose workers they are."""

    def lost(self, slot: WorkerSlot, crashed: bool) -> None:
        """A worker died, and another one starts in its stead."""

    def refused(self, slot: WorkerSlot, message: str, left: int) -> None:
        """A worker cannot take part, and `left` others can or may."""


class Workers:
    """The workers of one cluster; use as a context, which ends them. `slots` are those that run or start."""

    def __init__(self, model: str, address: str, wanted: int | None, use_gpus: bool) -> None:
        """Raises ClusterFailed where the cluster cannot be reached, MissingExtra without Ray."""
        self._ray = import_ray()
        self._model = model
        self._ours = connect(self._ray, address)
        self.size = ClusterSize.of(self._ray.nodes(), wanted, use_gpus)
        self.slots: list[WorkerSlot] = []
        self._next = 0
        self._alone_since, self._looked, self._lack, self._last_words = time.monotonic(), 0.0, "", ""
        self._facts: Mapping[str, object] = {}
        self._examine = self._ray.remote(num_cpus=0, max_retries=0)(post_mortem)

    @property
    def without_space(self) -> str:
        """A sentence where some workers must wait for nodes, else ""."""
        return self.size.without_space(self._ray.nodes())

    def lack(self) -> str:
        """Why no worker runs and what to do, where none has for a while; else ""."""
        now = time.monotonic()
        if any(slot.info is not None and not slot.dead for slot in self.slots):
            self._alone_since, self._lack, self._last_words = now, "", ""
        elif now - self._alone_since > PATIENCE_SECONDS and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._lack = self.size.lack(self._ray.nodes(), self._ray.available_resources(), self._last_words)
        return self._lack

    def start(self, facts: Mapping[str, object]) -> None:
        """Starts those that are missing; each checks that `facts` of a job's identity are true where it runs."""
        self._facts, self._alone_since = facts, time.monotonic()
        while len(self.slots) < self.size.workers:
            self._start_one()

    def call(self, slot: WorkerSlot, then: Callable[[WorkerSlot, Any], None], method: str, *arguments: Any) -> None:
        """Asks an idle worker; `then` is called with the answer during a later `poll`."""
        slot.ref, slot.then = slot.actor.call.remote(method, *arguments), then

    def poll(self, owner: Owner, seconds: float) -> None:
        """Takes the answers that are there, and waits up to `seconds` for one where none is."""
        with _signals():
            self._poll(owner, seconds)

    def _poll(self, owner: Owner, seconds: float) -> None:
        asked = {slot.ref: slot for slot in self.slots if slot.ref is not None}
        if not asked:
            time.sleep(min(seconds, 0.05))
            return
        ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(list(asked), num_returns=1, timeout=seconds)
        for ref in ready:
            self._answered(owner, asked[ref])

    def close(self) -> None:
        for slot in self.slots:
            self._end(slot)
        self.slots = []
        if self._ours:
            self._ray.shutdown()

    def _start_one(self) -> None:
        size = self.size
        remote = self._ray.remote(
            num_cpus=size.cpus, num_gpus=size.gpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )(WorkerActor)
        slot = WorkerSlot(self._next, remote.remote(self._model))
        self._next += 1
        slot.ref, slot.then = slot.actor.hello.remote(dict(self._facts)), _greeted
        self.slots.append(slot)

    def _answered(self, owner: Owner, slot: WorkerSlot) -> None:
        ref, then = slot.ref, slot.then
        slot.ref = slot.then = None
        try:
            found = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            self._failed(owner, slot, error)
            return
        if slot.dead:
            self._replace(owner, slot, crashed=found)
        elif isinstance(found, Refused):
            self._end(slot)
            self.slots.remove(slot)
            self.size = replace(self.size, workers=self.size.workers - 1)
            owner.refused(slot, found.message, len(self.slots))
        elif then is not None:
            then(slot, found)

    def _failed(self, owner: Owner, slot: WorkerSlot, error: Exception) -> None:
        if slot.dead or (slot.info is None and not isinstance(error, self._ray.exceptions.RayTaskError)):
            # The machine is gone, or the worker before it did anything.
            self._last_words = str(error).partition("\n")[0].rstrip(" .:")
            self._replace(owner, slot, crashed=False)
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            # An error that nobody foresaw: the worker cannot be trusted any more.
            print(f"moedge: a worker failed: {error}", file=sys.stderr, flush=True)
            self._replace(owner, slot, crashed=True)
        else:
            assert slot.info is not None
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(slot.node, soft=False)
            slot.dead = True
            info = slot.info
            slot.ref = self._examine.options(scheduling_strategy=strategy).remote(
                info.folder, info.pid, info.memory_kills
            )

    def _replace(self, owner: Owner, slot: WorkerSlot, crashed: bool) -> None:
        self._end(slot)
        self.slots.remove(slot)
        self._start_one()
        owner.lost(slot, crashed)

    def _end(self, slot: WorkerSlot) -> None:
        with suppress(Exception):
            self._ray.kill(slot.actor, no_restart=True)


@contextmanager
def _signals() -> Iterator[None]:
    """What a signal's handler raises while Ray's compiled code runs comes out of it as the cause of a SystemError."""
    try:
        yield
    except SystemError as error:
        raise error.__cause__ or error from None


def _greeted(slot: WorkerSlot, found: tuple[WorkerInfo, str]) -> None:
    slot.info, slot.node = found


@contextmanager
def open_workers(model: str, address: str, wanted: int | None, use_gpus: bool) -> Iterator[Workers]:
    """Raises as `Workers`."""
    doing = "starting a Ray cluster on this machine" if address == LOCAL else f"connecting to the cluster at {address}"
    with stage(doing), _signals():
        workers = Workers(model, address, wanted, use_gpus)
    try:
        yield workers
    finally:
        workers.close()
