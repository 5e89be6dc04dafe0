"""A batch job from its files to its summary, phase by phase, so that a person can be told of each. Prints nothing."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Self

from ...offload.heap import Heap
from ..engine.metrics import Metrics
from ..loading.engine_loader import LoadedEngine, load_engine, load_with_fallback, rehearse
from ..loading.prepare import store_for
from ..plan.fallback import FallbackPolicy
from ..plan.memory_ledger import TierLedger
from ..plan.placement import Plan
from ..plan.planner import PlanResult, SearchSpace
from ..rows.answer_formats import Answers
from ..rows.reader import RowFile, read_rows
from ..rows.row import BadRow
from ..source.model_source import open_source
from ..text.tokenizer import Tokenizer
from .encode import JobSize, RowEncoder, measure
from .folder import seekable
from .job_plan import plan_job, remember
from .order import Pending
from .outputs import claim_output
from .report import summarise, summarise_rows
from .request import BatchRequest
from .run import Job
from .session import JobSession
from .stop import StallGuard, StopRule
from .summary import RunSummary, Seconds


class BatchRun:
    """Phases in order: construct (files are checked), `measure`, `plan`, `load`, `passes`, then `finish` or `stop`.

    A job that is `finished` when it is constructed needs `finish` alone. Use as a context manager: leaving it ends
    every process and thread; every answer that was confirmed is kept.
    """

    def __init__(self, request: BatchRequest) -> None:
        self.request = request
        self.seconds = Seconds()
        self.stopped_because: str | None = None
        self._stop_rule = StopRule(request.limits)
        self._begun = time.perf_counter()
        self._loaded: LoadedEngine | None = None
        with ExitStack() as resources:
            self.source = resources.enter_context(open_source(request.model))
            self.paths = claim_output(request.output, request.input, self.source.folder)
            self.ledger = resources.enter_context(JobSession(request, self.paths, self.source))
            self.preflight = self.ledger.preflight
            self._resources = resources.pop_all()

    @property
    def finished(self) -> bool:
        return self.ledger.finished

    def measure(self) -> JobSize:
        """Tokenizes every row to be run once: what is too long is known before a weight is loaded."""
        shape, ledger = self.source.shape, self.ledger
        self._tokenizer = self._resources.enter_context(Tokenizer.load(self.source.folder, ledger.created))
        file = self._resources.enter_context(seekable(ledger.input, ledger.folder))
        self._file = RowFile(file, self.preflight.places, self.request.defaults)
        bad = set(self.preflight.bad_rows)
        rows = (self._file.row(row) for row in ledger.rows_to_run() if row not in bad)
        self.size, order = measure(rows, RowEncoder(self._tokenizer, shape.vocab, shape.context))
        self._order = array("Q", order.rows())
        return self.size

    def plan(self) -> Plan:
        """The job begins here: its first record says what "auto" became."""
        self._job, budgets = self.size.shape(), self.request.budgets
        self._memory = budgets.open()
        settings, saved = self.ledger.settings(), self.request.plan
        self.planned: PlanResult = plan_job(self.source, settings, budgets, self._memory.budget, self._job, saved)
        self.plan_made = self.planned.plan
        self.ledger.begin(self.plan_made)
        return self.plan_made

    def load(self) -> LoadedEngine:
        """Weights into memory, from a store where they do not fit; the store is made first where it is missing.

        Ends with a rehearsal of the worst pass.
        """
        begun = time.perf_counter()
        store = store_for(self.source, self.plan_made, self.request.budgets)
        options, offsets = self.request.experts, self.ledger.key_offsets(self.source.shape)
        self.concessions = FallbackPolicy(self.plan_made, self.planned.request)

        def load(plan: Plan) -> LoadedEngine:
            return load_engine(self.source, plan, store, self._memory.device, options, offsets)

        self._loaded = load_with_fallback(load, self.concessions)
        self._resources.callback(self._loaded.close)
        self.ledger.settle_offsets(self._loaded.key_offsets)
        rehearse(self._loaded, self.concessions.plan, self._job)
        self.seconds.load = time.perf_counter() - begun
        return self._loaded

    @property
    def for_every_row(self) -> str:
        """The least budget that leaves no row out, as an option."""
        return SearchSpace(self.planned.request).for_every_row

    @property
    def over_budget(self) -> list[TierLedger]:
        """Tiers of memory whose peak was over their budget."""
        return [] if self._loaded is None else self._loaded.ledger.over_budget

    @property
    def metrics(self) -> Metrics:
        assert self._loaded is not None
        return self._loaded.engine.metrics

    def passes(self) -> Iterator[None]:
        """Runs the job, a pass per iteration, to its end or until `stopped_because` says why not."""
        assert self._loaded is not None
        begun, shape, ledger = time.perf_counter(), self.source.shape, self.ledger
        encoder = RowEncoder(self._tokenizer, shape.vocab, shape.context, self.concessions.plan.kv_tokens)
        answers = Answers(ledger.model_name, int(ledger.created.timestamp()))
        job = Job(self._loaded.engine, encoder, answers, ledger.journal, self.preflight.places.digest)
        heap = Heap()
        pending = Pending(ledger.journal.state, self._file, self._order, self._bad_rows())
        with ledger.working(), StallGuard(self._work, self._loaded.streamed, ledger.folder.stacks) as guard:
            for _ in guard.watched(job.run(pending.waves())):
                heap.after_pass()
                self.seconds.generate = time.perf_counter() - begun
                yield
                self.stopped_because = (
                    self._stop_rule.reason(ledger.journal.state.counts.failed, self.preflight.num_rows)
                    or ledger.cancelled()
                )
                if self.stopped_because is not None:
                    return
            ledger.journal.sync()
        if not ledger.finished:
            self.stopped_because = f"{self.request.limits.max_rows:,} rows were run"

    def finish(self) -> RunSummary:
        """Publishes the output files and sums up."""
        self.ledger.finish()
        return self._sum_up()

    def stop(self, reason: str) -> RunSummary:
        """Publishes what is finished as the partial file, and sums up."""
        self.ledger.stop(reason)
        return self._sum_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def _work(self) -> int:
        return self.metrics.passes + self.ledger.journal.state.counts.rows

    def _bad_rows(self) -> Iterator[BadRow]:
        """Read in order once more, because only that shows which ids come twice."""
        wanted = set(self.preflight.bad_rows).intersection(self.ledger.rows_to_run())
        if wanted:
            rows = read_rows(self.ledger.input, self.request.defaults)
            yield from (row for row in rows if isinstance(row, BadRow) and row.index in wanted)

    def _sum_up(self) -> RunSummary:
        self.seconds.total = time.perf_counter() - self._begun
        counts = self.ledger.journal.state.counts
        if self._loaded is None:
            return summarise_rows(counts)
        summary = summarise(self.source, self.planned, self._loaded, counts, self.seconds, self.concessions)
        remember(self.planned, self.source, self.metrics, self.seconds.generate or 0, self._loaded.ledger)
        return summary
