"""A batch job as a sequence of states: Checked, Measured, Planned, Loaded, Running, Ended. Prints nothing.

Each state is built from the one before by the method that is named after the step, so a job cannot be in two of them,
and what a state knows is what its class has. `Checked` is the context manager that frees everything, except what it
was given: a job may run on a `LoadedModel`, which stays open.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from ...offload.memory import Heap
from ..engine.engine import Metrics
from ..loading.engine_loader import LoadedEngine, load_engine, load_with_fallback
from ..loading.machine_memory import MachineMemory, limit_pins, open_memory
from ..loading.prepare import store_for
from ..loading.rehearsal import prompt_tokens, rehearse
from ..plan.fallback import FallbackPolicy
from ..plan.memory_ledger import TierLedger
from ..plan.placement import Plan, Workload
from ..plan.planner import PlanResult, SearchSpace
from ..rows.answer_formats import Answers
from ..rows.failure import RowFailure
from ..rows.preflight import Preflight
from ..rows.reader import RowFile, read_rows
from ..sampling.model_defaults import ModelDefaults, model_defaults
from ..settings.errors import InputRefused
from ..source.model_source import ModelSource, open_source
from ..text.tokenizer import Tokenizer
from ..weights.key_offsets import MAX_TOKENS, TEXT
from .answer_stream import AnswerStream, partial_file
from .encode import JobSize, RowEncoder, TokenSpool, measure
from .eta import Eta, Work
from .folder import seekable
from .job_plan import plan_job, remember, with_workload
from .outputs import OutputPaths, claim_output
from .report import summarise, summarise_rows
from .request import BatchRequest, identity, settled_rows
from .run import FileRows, RowRunner, RowSource
from .session import JobClaim, JobInput, JobSession, lock_folder, refuse_start_over, start_over
from .stop import StallGuard, StopRule
from .summary import RunSummary, Seconds


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine that is ready for jobs, and all that belongs to it: whoever loaded it closes it.

    `chosen` is the plan that it was loaded by, with the workload that was planned for; `policy` is what memory made of
    that plan. No other work may be on the engine while a job runs.
    """

    source: ModelSource
    tokenizer: Tokenizer
    memory: MachineMemory
    chosen: PlanResult
    policy: FallbackPolicy
    engine: LoadedEngine

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and answer, that it has memory for."""
        return min(self.policy.plan.kv_tokens, self.chosen.request.workload.longest)


@dataclass(frozen=True, slots=True)
class Checked:
    """The model's headers are read, the input is valid, and the output is claimed; nothing was written.

    `sampling` are those defaults of rows that the model sets. A job whose last row has its answer is `finished`: end it
    with `publish`. Every other is measured next. Leaving the context ends every process and thread of the job; every
    answer that was confirmed is kept. The job runs on `given`, or loads an engine of its own where that is None.
    """

    request: BatchRequest
    source: ModelSource
    claim: JobClaim
    stop_rule: StopRule
    resources: ExitStack
    begun: float
    sampling: ModelDefaults
    given: LoadedModel | None = None

    @classmethod
    def open(cls, request: BatchRequest, given: LoadedModel | None = None) -> Self:
        """Raises the errors of settings/errors.py for a model, an input, an output or limits that are refused."""
        stop_rule, begun = StopRule(request.limits), time.perf_counter()
        with ExitStack() as resources:
            source = given.source if given else resources.enter_context(open_source(request.model))
            sampling = model_defaults(source.folder).only(request.unset)
            request = replace(request, defaults=replace(request.defaults, **sampling.values))
            request = settled_rows(request, source.folder)
            paths = claim_output(request.output, request.input, source.folder)
            folder = resources.enter_context(lock_folder(paths))
            if request.resume.overwrite:
                # Before rows from a pipe replace those of the job.
                refuse_start_over(folder, paths)
            rows = JobInput.check(request, folder)
            if rows.preflight.refused(request.lenient):
                raise InputRefused(rows.preflight.report(request.lenient))
            if request.resume.overwrite:
                start_over(folder, paths)
            facts = identity(source, request.defaults, request.lenient)
            claim = JobClaim(request, paths, folder, rows, facts)
            resources.callback(claim.close)
            return cls(request, source, claim, stop_rule, resources.pop_all(), begun, sampling, given)

    @property
    def finished(self) -> bool:
        return self.claim.finished

    @property
    def preflight(self) -> Preflight:
        return self.claim.rows.preflight

    @property
    def paths(self) -> OutputPaths:
        return self.claim.paths

    def publish(self) -> Ended:
        """The end of a job that was finished before: its files are published where they are missing."""
        session = self.claim.session()
        session.finish()
        return Ended(session, self.paths, summarise_rows(session.journal.state.counts))

    def measure(self) -> Measured:
        """Tokenizes every row to be run: what is too long is known before a weight is loaded."""
        source, claim, given = self.source, self.claim, self.given
        # Templates get the date at which the job began.
        opened = given.tokenizer.dated(claim.created) if given else Tokenizer.load(source.folder, claim.created)
        tokenizer = self.resources.enter_context(opened)
        text = self.resources.enter_context(seekable(claim.rows.path, claim.folder))
        file = RowFile(text, self.preflight.index, self.request.defaults)
        spool = TokenSpool(claim.folder.path, self.preflight.num_rows)
        self.resources.callback(spool.close)
        bad = set(self.preflight.bad_rows)
        rows = (claim.cut.longer(file.row(row)) for row in claim.rows_to_run() if row not in bad)
        encoder = RowEncoder(tokenizer, source.shape.vocab, source.shape.context, spool=spool)
        size, order = measure(rows, encoder)
        spool.seal()
        if claim.job_id is None and self.request.limits.max_rows is None:
            # A job that has begun has answers to come, or rows that were already counted as errors.
            size.refuse_most(self.preflight, self.request.lenient)
        return Measured(self, tokenizer, spool, file, size, array("Q", order.rows()), encoder.notes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.resources.close()


@dataclass(frozen=True, slots=True)
class Measured:
    """Every row to be run is tokenized; `order` are their numbers, the first to run first.

    `notes` say what rows ask for and the model does not do.
    """

    checked: Checked
    tokenizer: Tokenizer
    spool: TokenSpool
    file: RowFile
    size: JobSize
    order: array[int]
    notes: tuple[str, ...] = ()

    def plan(self) -> Planned:
        """The job begins here: its first record says what "auto" became. An engine that was given keeps its plan.

        Raises DoesNotFit, SettingError, JobMismatch.
        """
        checked, workload, budgets = self.checked, self.size.shape(), self.checked.request.budgets
        if (given := checked.given) is not None:
            chosen = with_workload(given.chosen, given.policy.plan, workload)
            return Planned(self, workload, given.memory, chosen, checked.claim.begin(chosen.plan))
        source, settings, saved = checked.source, checked.claim.settings, checked.request.plan
        memory = open_memory(budgets, source.settle(settings), source.shape)
        chosen = plan_job(source, settings, budgets, memory.budget, workload, saved)
        limit_pins(memory.device, chosen.request.profile)
        return Planned(self, workload, memory, chosen, checked.claim.begin(chosen.plan))


@dataclass(frozen=True, slots=True)
class Planned:
    """The job is in its journal, and `chosen` says with what it is to run."""

    measured: Measured
    workload: Workload
    memory: MachineMemory
    chosen: PlanResult
    session: JobSession

    @property
    def plan(self) -> Plan:
        return self.chosen.plan

    @property
    def for_every_row(self) -> str:
        """The least budget that leaves no row out, as an option."""
        return SearchSpace(self.chosen.request).for_every_row

    def load(self) -> Loaded:
        """Weights into memory, from a store where they do not fit; the store is made first where it is missing.

        Ends with a rehearsal of the worst pass, and the engine is closed with the job. Of an engine that was given,
        only the counters are reset. Raises DoesNotFit, MemoryGaveOut.
        """
        begun, checked, memory = time.perf_counter(), self.measured.checked, self.memory
        source, request = checked.source, checked.request
        if (given := checked.given) is not None:
            given.engine.start_counting()
            return Loaded(self, given.engine, given.policy, 0.0, given.longest)
        policy = FallbackPolicy(self.plan, self.chosen.request)
        load = partial(
            load_engine,
            source,
            store=store_for(source, self.plan, request.budgets),
            device=memory.device,
            experts=request.experts,
            key_offsets=self.session.key_offsets(source.shape),
        )
        engine = load_with_fallback(load, policy)
        checked.resources.callback(engine.close)
        text = self.measured.tokenizer.encode(TEXT)[:MAX_TOKENS]
        rehearse(engine, policy.plan, self.workload, prompt_tokens(text, source.shape.vocab))
        engine.ledger.measure().check()
        return Loaded(self, engine, policy, time.perf_counter() - begun, policy.plan.kv_tokens)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine is ready for the first pass; `policy` says what memory made of the plan meanwhile.

    Sequences of more than `longest` tokens are refused.
    """

    planned: Planned
    engine: LoadedEngine
    policy: FallbackPolicy
    load_seconds: float
    longest: int

    def run(self) -> Running:
        return Running(self)


class Running:
    """Iterate `passes`, then call `end`. `stopped_because` says why the passes ended before the last row."""

    def __init__(self, loaded: Loaded, rows: RowSource | None = None) -> None:
        """`rows` are those of the input file that have no answer, unless another source is given."""
        self._loaded = loaded
        self._planned = loaded.planned
        self._checked = loaded.planned.measured.checked
        self.session = loaded.planned.session
        self.policy = loaded.policy
        self.stopped_because: str | None = None
        self._rows = rows or self._file_rows()
        self._seconds: float | None = None

    @property
    def metrics(self) -> Metrics:
        return self._loaded.engine.engine.metrics

    def eta(self) -> Eta:
        """The estimate of the remaining time; update it after every pass."""
        found, size, plan = self._checked.preflight, self._planned.measured.size, self._planned.plan
        done = self._checked.claim.num_done
        return Eta(Work(found.num_rows, done, size.prompt_tokens, size.max_generated_tokens, plan.tokens_per_pass))

    def passes(self) -> Iterator[None]:
        """Runs the job, a pass per iteration, to its end or until `stopped_because` says why not."""
        begun, session, engine, heap = time.perf_counter(), self.session, self._loaded.engine, Heap()
        stacks = session.folder.stacks
        with session.working(engine.key_offsets), StallGuard(self._work, engine.streamed, stacks) as guard:
            partial = self._partial_file()
            for _ in guard.watched(self._runner().passes()):
                heap.after_pass()
                if partial is not None:
                    partial.upto(self.session.folder.journal, self.session.committed.end)
                self._seconds = time.perf_counter() - begun
                yield
                self.stopped_because = self._why_stop()
                if self.stopped_because is not None:
                    return
            session.journal.sync()
        if not session.finished:
            self.stopped_because = f"--max-rows {self._checked.request.limits.max_rows:,} reached"

    def end(self, reason: str | None = None) -> Ended:
        """Publishes the output files, or, where the job stopped early, what is finished as the partial file."""
        reason = reason or self.stopped_because
        if reason is None:
            self.session.finish()
        else:
            self.session.stop(reason)
        summary, over = self._summary(), tuple(self._loaded.engine.ledger.over_budget)
        return Ended(self.session, self._checked.paths, summary, reason, over)

    def _partial_file(self) -> AnswerStream | None:
        """The file that grows with the answers, where it is asked for; closed with the job."""
        if not self._checked.request.follow:
            return None
        file = partial_file(self.session.journal, self.session.folder, self._checked.paths)
        self._checked.resources.callback(file.close)
        return file

    def _runner(self) -> RowRunner:
        measured, shape, claim = self._planned.measured, self._checked.source.shape, self._checked.claim
        encoder = RowEncoder(measured.tokenizer, shape.vocab, shape.context, self._loaded.longest, spool=measured.spool)
        answers = Answers(claim.model_name, int(claim.created.timestamp()), measured.tokenizer.token_text)
        return RowRunner(self._loaded.engine.engine, encoder, answers, self.session.journal, self._rows)

    def _file_rows(self) -> FileRows:
        measured, claim = self._planned.measured, self._checked.claim
        invalid = set(self._checked.preflight.bad_rows).intersection(claim.rows_to_run())
        return FileRows(self.session.journal.state, measured.file, measured.order, _failures(claim, invalid), claim.cut)

    def _why_stop(self) -> str | None:
        failed, rows = self.session.journal.state.counts.failed, self._checked.preflight.num_rows
        return self._checked.stop_rule.reason(failed, rows) or self.session.cancelled()

    def _work(self) -> int:
        return self.metrics.passes + self.session.journal.state.counts.rows

    def _summary(self) -> RunSummary:
        source, chosen, engine = self._checked.source, self._planned.chosen, self._loaded.engine
        total = time.perf_counter() - self._checked.begun
        seconds = Seconds(self._loaded.load_seconds, self._seconds, total)
        summary = summarise(source, chosen, engine, self.session.journal.state.counts, seconds, self.policy)
        summary.model = {**summary.model, "generation_config": dict(self._checked.sampling.values)}
        took = self._loaded.load_seconds, self._seconds or 0
        remember(chosen, source, self.metrics, took, engine.ledger)
        return summary


def _failures(claim: JobClaim, rows: Collection[int]) -> Iterator[RowFailure]:
    """Answers of rows that cannot run. The input is read again in order, because only that shows duplicate ids."""
    if rows:
        read = read_rows(claim.rows.path, claim.rows.defaults)
        yield from (row for row in read if isinstance(row, RowFailure) and row.index in rows)


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a run: `reason` is None if every row has its answer, else it says why not.

    `over_budget` are the tiers of memory whose peak was above their budget.
    """

    session: JobSession
    paths: OutputPaths
    summary: RunSummary
    reason: str | None = None
    over_budget: tuple[TierLedger, ...] = ()

    @property
    def finished(self) -> bool:
        return self.session.finished
