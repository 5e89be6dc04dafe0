"""A batch job whose rows are computed by workers of a cluster. The journal of this process is the only authority.

Rows are leased (leases.py); what "auto" becomes is resolved once, by the plan of the first worker that can run the job,
and is in the journal. The others plan their own memory and prepare their own stores; one on which the job does not
fit is left out by name. Between two passes here, the workers' reports are in the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from ...face import (
    Counts,
    ErrorCode,
    Fallback,
    FallbackPolicy,
    JobSession,
    KeyOffsets,
    Measured,
    Metrics,
    Planned,
    PlanResult,
    Row,
    RowFailure,
    RowSource,
    RunSummary,
    Seconds,
    TierLedger,
    WorkerRun,
    errors,
    merge_summaries,
    stage,
)
from .leases import LeaseTable
from .worker import JobFacts, LeasedRow, LoadOrder, LoadReport, WorkReport
from .workers import Workers, WorkerSlot, open_workers

# Crashes in a row, without an answer in between, after which a job stops: another worker would crash, too.
_MOST_CRASHES = 5
_POLL_SECONDS = 0.5
_TAKEN_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class LeftOut(Fallback):
    """A worker that cannot take part; `cause` is its name and why."""

    def __str__(self) -> str:
        return f"left out: {self.cause}; {self.after} of {self.before} {self.what} are left"


@dataclass(frozen=True, slots=True)
class NoWorker(Fallback):
    """None runs; `cause` says why, and what to do."""

    def __str__(self) -> str:
        return self.cause


@contextmanager
def open_cluster(measured: Measured) -> Iterator[RayCluster]:
    """The cluster that the request of a job names. Raises ClusterFailed, MissingExtra, SettingError."""
    request = measured.checked.request
    if request.plan is not None:
        raise errors.SettingError("--plan is for one machine; the workers of a cluster plan for themselves")
    assert request.cluster is not None
    address, wanted = request.cluster.address, request.cluster.workers
    # A folder has the same path on every machine; workers run elsewhere.
    model = str(Path(request.model).resolve()) if Path(request.model).is_dir() else request.model
    with open_workers(model, address, wanted, request.budgets.wants_device) as workers:
        yield RayCluster(workers)


class RayCluster:
    """Workers that stay loaded from one job to the next, as long as it has no longer rows."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.left_out: list[LeftOut | NoWorker] = []
        self.chosen: PlanResult | None = None
        self.offsets: KeyOffsets | None = None
        self.job: ClusterJob | None = None
        self._order: LoadOrder | None = None
        self._loading = False
        self._planner: WorkerSlot | None = None
        self._crashes = 0
        self._lacking = False

    def plan(self, measured: Measured) -> Planned:
        """The job begins, as `Measured.plan` begins one here. Raises ClusterFailed, JobMismatch."""
        checked, workload = measured.checked, measured.size.shape()
        if self.chosen is None or workload.longest > min(
            self.chosen.plan.kv_tokens, self.chosen.request.workload.longest
        ):
            self.chosen, self._loading = None, False
            for slot in self.workers.slots:
                slot.loaded = None
            request = replace(checked.request, settings=checked.claim.settings)
            self._order = LoadOrder(request, workload, self.workers.size.share)
            self.workers.start(checked.claim.facts)
            self._wait("starting workers", lambda: self.chosen is not None, self.workers.without_space)
        assert self.chosen is not None
        return measured.planned(self.chosen, self.chosen.plan, workload)

    def load(self, planned: Planned) -> ClusterJob:
        """Returns when the first worker is ready; the others join when they are."""
        begun, checked = time.perf_counter(), planned.measured.checked
        assert self._order is not None
        self.offsets = self.offsets or planned.session.key_offsets(checked.source.shape)
        # What "auto" became is settled now; attention is computed by what each machine has.
        least = min(planned.plan.kv_tokens, self._order.workload.longest)
        request = replace(self._order.request, settings=checked.claim.settings)
        self._order = replace(self._order, request=request, least_tokens=least, offsets=self.offsets)
        self._loading = True
        self._wait("loading on the workers", self._loaded)
        return ClusterJob(self, planned, time.perf_counter() - begun)

    def _wait(self, doing: str, ready: Callable[[], object], announcement: str = "") -> None:
        """Steps until it is ready; where no worker runs meanwhile, a line says why."""
        while not ready():
            lack = self.workers.lack()
            with stage("waiting for a worker" if lack else doing, announcement=lack or announcement) as advance:
                while not ready() and self.workers.lack() == lack:
                    self.step()
                    advance(0)
            announcement = ""

    def note_lack(self) -> None:
        """Remembers once that no worker is left, and why, until one is there again."""
        if (lack := self.workers.lack()) and not self._lacking:
            self.left_out.append(NoWorker("workers", self.workers.size.workers, 0, lack))
        self._lacking = bool(lack)

    def _loaded(self) -> list[LoadReport]:
        return [slot.loaded for slot in self.workers.slots if slot.loaded is not None]

    @property
    def loss(self) -> Mapping[str, float]:
        return next((each.loss for each in self._loaded()), {})

    def step(self) -> None:
        """Gives every idle worker what it is to do next, and takes what others say. Raises ClusterFailed."""
        for slot in [each for each in self.workers.slots if each.idle]:
            self._assign(slot)
        self.workers.poll(self, _POLL_SECONDS)

    def _assign(self, slot: WorkerSlot) -> None:
        if self.chosen is None:
            if self._planner is None:
                self._planner = slot
                self.workers.call(slot, self._planned, "plan", self._order)
        elif slot.loaded is None:
            if self._loading and not self._must_wait():
                self.workers.call(slot, self._took_load, "load", self._order)
        elif self.job is not None:
            self.job.assign(slot)

    def _must_wait(self) -> bool:
        """Offsets of quantized keys are measured by one worker, for all of them."""
        assert self.chosen is not None
        measured = self.offsets is not None or not self.chosen.plan.kv.startswith("int") or bool(self._loaded())
        return not measured and any(slot.then == self._took_load for slot in self.workers.slots)

    def _planned(self, slot: WorkerSlot, chosen: PlanResult) -> None:
        self.chosen, self._planner = chosen, None

    def _took_load(self, slot: WorkerSlot, report: LoadReport) -> None:
        slot.loaded = report
        if self.offsets is None and report.offsets is not None:
            assert self._order is not None
            self.offsets = report.offsets
            self._order = replace(self._order, offsets=report.offsets)

    def lost(self, slot: WorkerSlot, crashed: bool) -> None:
        """A worker died. Raises ClusterFailed where they all do."""
        self._forget(slot, crashed)
        self._crashes += crashed
        if self._crashes >= _MOST_CRASHES:
            raise errors.ClusterFailed(
                f"{self._crashes} workers crashed one after the other, and no row was answered in between; "
                "the logs of Ray's workers say more. Start the same command again when it is mended"
            )

    def refused(self, slot: WorkerSlot, message: str, left: int) -> None:
        """Raises ClusterFailed where none is left."""
        name = slot.info.name if slot.info is not None else f"worker {slot.number}"
        self._forget(slot, crashed=False)
        self.left_out.append(LeftOut("workers", left + 1, left, f"{name}: {message}"))
        if not left:
            causes = "; ".join(each.cause for each in self.left_out)
            raise errors.ClusterFailed(f"no worker of the cluster can take part: {causes}")

    def answered(self) -> None:
        """A row has its answer: the workers are not all doomed."""
        self._crashes = 0

    def _forget(self, slot: WorkerSlot, crashed: bool) -> None:
        if self._planner is slot:
            self._planner = None
        if self.job is not None:
            self.job.release(slot, crashed)


class ClusterJob:
    """The executor of a job whose workers are loaded. `metrics` add up over all workers, dead ones too."""

    def __init__(self, cluster: RayCluster, planned: Planned, load_seconds: float) -> None:
        self.planned = planned
        self.load_seconds = load_seconds
        self.over_budget: tuple[TierLedger, ...] = ()
        self.expert_use = None
        self._cluster = cluster
        self._policy = FallbackPolicy(planned.plan, planned.chosen.request)
        claim = planned.session.claim
        self._facts = JobFacts(uuid4().hex, claim.model_name, claim.created)
        self._leases = LeaseTable()
        self._rows: dict[int, LeasedRow] = {}
        # Whose progress of a row the journal gets.
        self._recorders: dict[int, int] = {}
        self._source: RowSource | None = None
        self._last = False
        # By the numbers of workers, of which one that died has none again.
        self._reports: dict[int, WorkReport] = {}
        self._summaries: dict[int, RunSummary] = {}
        self._runs: dict[int, WorkerRun] = {}

    @property
    def policy(self) -> FallbackPolicy:
        self._policy.applied += self._cluster.left_out
        self._cluster.left_out.clear()
        return self._policy

    @property
    def metrics(self) -> Metrics:
        return Metrics.summed((each.metrics for each in self._reports.values()), sequences=False)

    @property
    def num_workers(self) -> int | None:
        return sum(slot.loaded is not None for slot in self._cluster.workers.slots)

    @property
    def expert_hit_rate(self) -> float | None:
        wanted = sum(each.wanted for each in self._reports.values())
        return sum(each.hits for each in self._reports.values()) / wanted if wanted else None

    @property
    def key_offsets(self) -> KeyOffsets | None:
        return self._cluster.offsets

    @property
    def loss(self) -> Mapping[str, float]:
        return self._cluster.loss

    def passes(self, session: JobSession, rows: RowSource) -> Generator[None]:
        """Ends when every row of the source has its answer in the journal; a cluster without workers is waited for."""
        self._cluster.job, self._source = self, rows
        try:
            while not rows.exhausted or self._leases.num_open:
                self._take(rows)
                self._last = rows.exhausted
                self._cluster.step()
                self._cluster.note_lack()
                yield
        finally:
            self._cluster.job = None

    def assign(self, slot: WorkerSlot) -> None:
        """Gives a worker rows to compute, those beside that it has."""
        held, last = len(self._leases.held(slot.number)), self._last
        leased = self._leases.lease(slot.number, self._capacity(slot) - held, last)
        dropped = self._leases.dropped(slot.number)
        if leased or dropped or held:
            rows = [self._leased(row, slot.number) for row in leased]
            nothing_waits = last and not self._leases.num_waiting
            self._cluster.workers.call(slot, self._took_report, "work", self._facts, rows, dropped, nothing_waits)

    def _leased(self, row: int, worker: int) -> LeasedRow:
        """A row for a worker; one that no other has, too, goes on where the journal knows of it."""
        assert self._source is not None
        if self._leases.only_holder(row) == worker:
            self._recorders[row] = worker
            self._rows[row] = replace(self._rows[row], before=self._source.partial(row))
        return self._rows[row]

    def release(self, slot: WorkerSlot, crashed: bool) -> None:
        """A worker is gone."""
        for row, suspicion in self._leases.release(slot.number, crashed).items():
            if self._leases.commit(row):
                leased = self._rows.pop(row)
                failure = leased.row.failure(ErrorCode.WORKER_CRASHED, f"{suspicion}; it is not run again")
                self.planned.fail(failure, leased.digest)
        if (summary := self._summaries.get(slot.number)) is not None:
            self._summaries[slot.number] = summary.without_memory()

    def summary(self, counts: Counts, seconds: Seconds) -> RunSummary:
        metrics = Metrics.summed((each.metrics for each in self._reports.values()), sequences=True)
        found = merge_summaries(list(self._summaries.values()), metrics, counts, seconds)
        found.fallbacks = [*self.policy.applied, *found.fallbacks]
        found.workers = list(self._runs.values())
        return found

    def _capacity(self, slot: WorkerSlot) -> int:
        """Rows that a worker may have; before its first report, as many as the plan of the job lets run."""
        report = self._reports.get(slot.number)
        return 2 * self.planned.plan.max_sequences if report is None else report.capacity

    def _take(self, rows: RowSource) -> None:
        """From the source, as many as workers have space for."""
        ready = [slot for slot in self._cluster.workers.slots if slot.loaded is not None]
        space = sum(self._capacity(slot) - len(self._leases.held(slot.number)) for slot in ready)
        most = min(space - self._leases.num_waiting, _TAKEN_TOGETHER)
        if most > 0:
            for row in rows.take(most, alone=not self._leases.num_open):
                self._add(row, rows)

    def _add(self, row: Row | RowFailure, rows: RowSource) -> None:
        digest = rows.digest(row.index)
        if isinstance(row, RowFailure):
            self.planned.fail(row, digest)
            return
        token_ids = self.planned.measured.spool.token_ids(row.index)
        self._rows[row.index] = LeasedRow(row, token_ids, digest, answered=rows.answered(row.index))
        self._leases.add([row.index])

    def _took_report(self, slot: WorkerSlot, report: WorkReport) -> None:
        assert slot.info is not None
        number, run = slot.number, self._runs.setdefault(slot.number, WorkerRun(slot.info.name))
        answers = [done for done in report.done if self._leases.commit(done.row, number)]
        for row in [done.row for done in answers] + [
            row for row in report.unchanged if self._leases.commit(row, number)
        ]:
            del self._rows[row]
        journal, recorders, in_work = self.planned.session.journal, self._recorders, self._rows
        journal.done(*answers)
        for record in report.progress:
            journal.progress({row: some for row, some in record.items() if row in in_work and recorders[row] == number})
        if answers:
            self._cluster.answered()
        run.rows += len(answers)
        run.generated_tokens = report.metrics.generated_tokens
        if (before := self._reports.get(number)) is not None:
            report.metrics = report.metrics.behind(before.metrics)
            self._note_fallbacks(slot.info.name, report.fallbacks[len(before.fallbacks) :])
        else:
            self._note_fallbacks(slot.info.name, report.fallbacks)
        self._reports[number] = report
        if report.summary is not None:
            self._summaries[number] = report.summary
        self.over_budget = self.over_budget or report.over_budget

    def _note_fallbacks(self, name: str, fallbacks: Iterable[Fallback]) -> None:
        self._policy.applied += [replace(each, what=f"{each.what} of {name}") for each in fallbacks]
