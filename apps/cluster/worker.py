"""A worker of a cluster: one engine, planned and loaded where it runs, that computes rows which a job leases to it.

It knows nothing of Ray and of the journal: rows come and answers go with each call of `work`.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice

from ...face import (
    BatchRequest,
    Counts,
    CrashMarker,
    CutChoice,
    Done,
    Fallback,
    Heap,
    JobFolder,
    KeyOffsets,
    LoadedModel,
    Metrics,
    OpenModel,
    PlanResult,
    Row,
    RowRunner,
    RunSummary,
    Seconds,
    StallGuard,
    TierLedger,
    Tokenizer,
    Workload,
    errors,
    memory_kills,
    model_facts,
    summarise,
)

# A call of `work` returns after this time, or after the pass that is longer.
REPORT_SECONDS = 0.5
# Between two summaries, which cost more than counters.
_SUMMARY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """A row with the token ids of its prompts, the digest of its line, and what was generated for it before; whether
    that is a cut answer."""

    row: Row
    token_ids: list[list[int]] | None
    digest: str
    before: Sequence[CutChoice] = ()
    answered: bool = False


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What answers of a job say besides their text; `id` is another one for every run."""

    id: str
    model_name: str
    created: datetime


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """`folder` has the traces of a crash, `memory_kills` is what the kernel had killed when the worker began."""

    name: str
    pid: int
    folder: str
    memory_kills: int


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What a worker loads for a job: formats are resolved in the settings of `request`; it plans for its own budgets,
    1 / `share` of what is free.

    Raises DoesNotFit where sequences of `least_tokens` are too long for it.
    """

    request: BatchRequest
    workload: Workload
    share: int = 1
    least_tokens: int = 0
    offsets: KeyOffsets | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    seconds: float
    offsets: KeyOffsets | None
    loss: Mapping[str, float]
    generated_tok_s: float
    longest: int


@dataclass(slots=True)
class WorkReport:
    """What a call of `work` brought. `unchanged` rows were cut and cannot grow; `capacity` is how many it can hold;
    `progress` is what rows in work have generated since a report had it, one record after the other.

    `metrics` count since the job began, except that seconds of sequences are those since the last report. `hits` of
    `wanted` experts were in memory. `summary` comes now and then.
    """

    done: list[Done]
    unchanged: list[int]
    capacity: int
    metrics: Metrics
    progress: list[Mapping[int, Sequence[CutChoice]]] = field(default_factory=list)
    hits: int = 0
    wanted: int = 0
    fallbacks: list[Fallback] = field(default_factory=list)
    summary: RunSummary | None = None
    over_budget: tuple[TierLedger, ...] = ()


class _LeasedRows:
    """The rows that a worker has, as the source of its engine."""

    exhausted = False

    def __init__(self) -> None:
        self.held: dict[int, LeasedRow] = {}
        self.queue: deque[int] = deque()

    def lease(self, rows: Iterable[LeasedRow]) -> None:
        for each in rows:
            self.held[each.row.index] = each
            self.queue.append(each.row.index)

    def drop(self, rows: Collection[int]) -> None:
        self.queue = deque(row for row in self.queue if row not in rows)
        for row in rows:
            self.held.pop(row, None)

    def take(self, most: int, alone: bool) -> Sequence[Row]:
        rows = list(islice(self.queue, most))
        for _ in rows:
            self.queue.popleft()
        return [self.held[row].row for row in rows]

    def digest(self, row: int) -> str:
        return self.held[row].digest

    def partial(self, row: int) -> Sequence[CutChoice]:
        return self.held[row].before

    def answered(self, row: int) -> bool:
        return self.held[row].answered

    def token_ids(self, row: int) -> list[list[int]] | None:
        return self.held[row].token_ids

    def add(self, row: int, ids_of_prompts: Sequence[Sequence[int]]) -> None:
        """Nobody asks for them again."""


class _Answered:
    """Keeps answers, and what rows in work generate, until they are reported."""

    def __init__(self) -> None:
        self.rows: list[Done] = []
        self.progressed: list[Mapping[int, Sequence[CutChoice]]] = []

    def begin(self, rows: Iterable[int]) -> None:
        pass

    def progress(self, rows: Mapping[int, Sequence[CutChoice]]) -> None:
        self.progressed.append(rows)

    def done(self, *rows: Done) -> None:
        self.rows += rows


class _JobAtWork:
    """The rows of one job on the worker's engine."""

    def __init__(self, facts: JobFacts, model: LoadedModel, tokenizer: Tokenizer) -> None:
        self.id = facts.id
        self.rows, self.answered = _LeasedRows(), _Answered()
        self._resources = ExitStack()
        dated = self._resources.enter_context(tokenizer.dated(facts.created))
        named = facts.model_name, facts.created
        self.runner = RowRunner.of(model, dated, named, self.answered, self.rows, self.rows)
        self._passes = self.runner.passes()

    def rounds(self) -> Iterator[None]:
        """Passes as long as there are rows; the next call continues them."""
        while self.rows.held:
            next(self._passes)
            yield

    def drop(self, rows: Collection[int]) -> None:
        self.runner.drop(rows)
        self.rows.drop(rows)

    def collect(self) -> tuple[list[Done], list[int]]:
        """Rows that were answered since the last call, and those that were cut and cannot grow."""
        done, self.answered.rows = self.answered.rows, []
        for each in done:
            self.rows.held.pop(each.row, None)
        unchanged = list(self.rows.held.keys() - self.runner.open_rows - set(self.rows.queue))
        self.rows.drop(unchanged)
        return done, unchanged

    def close(self) -> None:
        self.drop(set(self.rows.held))
        self._resources.close()


@dataclass(slots=True)
class _Loaded:
    """A model and what counts of it since it was loaded; the last three are what was reported of it."""

    model: LoadedModel
    load_seconds: float
    heap: Heap
    seconds: float = 0.0
    summarised_at: float = 0.0
    num_total: int = 0
    num_tpot: int = 0

    def start_counting(self) -> None:
        """A job counts from its beginning."""
        self.model.engine.start_counting()
        self.seconds, self.num_total, self.num_tpot = 0.0, 0, 0

    def report(self, done: list[Done], unchanged: list[int]) -> WorkReport:
        """Sequences that were reported before are left out of the metrics: they are thousands."""
        policy, engine = self.model.policy, self.model.engine
        metrics = engine.engine.metrics
        ttft, total, tpot = (
            metrics.ttft[self.num_total :],
            metrics.total[self.num_total :],
            metrics.tpot[self.num_tpot :],
        )
        self.num_total, self.num_tpot = len(metrics.total), len(metrics.tpot)
        sent = replace(metrics, ttft=ttft, total=total, tpot=tpot)
        # Rows for a full pass, and as many that wait.
        report = WorkReport(done, unchanged, 2 * policy.plan.max_sequences, sent, fallbacks=list(policy.applied))
        if (cache := engine.streamed.experts.cache) is not None:
            report.hits, report.wanted = cache.counts.hits, cache.counts.wanted
        return report


class Worker:
    """Methods are called one after the other. Any error but a MoedgeError leaves it unusable."""

    def __init__(self, model: str, folder: JobFolder) -> None:
        """`folder` is on this machine and keeps the traces of a crash. Raises ModelNotFound and others."""
        self._resources = ExitStack()
        folder.make()
        self._folder = folder
        self._opened = self._resources.enter_context(OpenModel(model))
        self._kills = memory_kills()
        self._resources.enter_context(CrashMarker(folder))
        self._loaded: _Loaded | None = None
        self._job: _JobAtWork | None = None

    def hello(self, facts: Mapping[str, object]) -> WorkerInfo:
        """Raises JobMismatch where the model here, or what computes it, is another one than the job's."""
        source = self._opened.source
        for name, found in model_facts(source).items():
            if found != facts[name]:
                was = f"{facts[name]} -> {found}" if name == "versions" else "another one"
                raise errors.JobMismatch(f"{name} of {source.name}: {was}; install what the job was begun with")
        return WorkerInfo(f"{socket.gethostname()}:{os.getpid()}", os.getpid(), str(self._folder.path), self._kills)

    def plan(self, order: LoadOrder) -> PlanResult:
        """The plan by which this worker would run the job. Raises DoesNotFit, SettingError."""
        request = _shared(order)
        return self._opened.plan(request.settings, request.budgets, order.workload)

    def load(self, order: LoadOrder) -> LoadReport:
        """Plans and loads; the weights are prepared here where they are not. Raises DoesNotFit, MemoryGaveOut."""
        begun = time.perf_counter()
        self._unload()
        chosen = self.plan(order)
        if chosen.plan.kv_tokens < order.least_tokens:
            raise errors.DoesNotFit(
                f"sequences of {order.least_tokens:,} tokens are in the job, and {chosen.plan.kv_tokens:,} fit; give "
                "the workers larger budgets, or leave this machine out"
            )
        request = _shared(order)
        model = self._opened.load(request.settings, request.budgets, order.workload, request.stream, order.offsets)
        heap = self._opened.rehearse(model, order.workload)
        seconds = time.perf_counter() - begun
        self._loaded = _Loaded(model, seconds, heap)
        engine, rate = model.engine, chosen.prediction.generated_tok_s
        return LoadReport(seconds, engine.key_offsets, engine.loss, rate, model.longest)

    def work(self, facts: JobFacts, rows: Sequence[LeasedRow], dropped: Collection[int], last: bool) -> WorkReport:
        """Computes for a while. `dropped` rows need no answer any more; `last`: there are no other rows to lease."""
        assert self._loaded is not None
        loaded, job, begun = self._loaded, self._job_of(facts, self._loaded), time.perf_counter()
        job.drop(dropped)
        job.rows.lease(rows)
        done, unchanged = list[Done](), list[int]()
        engine = loaded.model.engine
        scheduler, metrics = engine.engine.scheduler, engine.engine.metrics
        with StallGuard(lambda: metrics.passes + len(done), engine.streamed, self._folder.stacks) as guard:
            for _ in guard.watched(job.rounds()):
                loaded.heap.after_pass()
                found, same = job.collect()
                done += found
                unchanged += same
                starved = not last and not job.rows.queue and scheduler.has_capacity
                if starved or time.perf_counter() - begun > REPORT_SECONDS:
                    break
        loaded.seconds += time.perf_counter() - begun
        report, now = loaded.report(done, unchanged), time.monotonic()
        report.progress, job.answered.progressed = job.answered.progressed, []
        if not job.rows.held or now - loaded.summarised_at > _SUMMARY_SECONDS:
            loaded.summarised_at, seconds = now, Seconds(load=loaded.load_seconds, generate=loaded.seconds)
            report.summary = summarise(loaded.model, loaded.model.chosen, Counts(), seconds)
            report.summary.bytes.written = loaded.model.nbytes_written
            report.over_budget = tuple(engine.ledger.over_budget)
        return report

    def close(self) -> None:
        """Frees the engine, and removes the mark of a living process."""
        self._unload()
        self._resources.close()

    def _unload(self) -> None:
        if self._job is not None:
            self._job.close()
        self._loaded = self._job = None
        self._opened.close_engines()

    def _job_of(self, facts: JobFacts, loaded: _Loaded) -> _JobAtWork:
        if self._job is None or self._job.id != facts.id:
            if self._job is not None:
                self._job.close()
            loaded.start_counting()
            self._job = _JobAtWork(facts, loaded.model, self._opened.tokenizer)
        return self._job


def _shared(order: LoadOrder) -> BatchRequest:
    """The request with the budgets of a worker that has others beside it: what is free is for all of them."""
    budgets = order.request.budgets
    if order.share == 1 or budgets.ram != "auto":
        return order.request
    return replace(order.request, budgets=replace(budgets, ram=f"{budgets.host_nbytes() // order.share}B"))
