"""A batch job from its files to its summary, phase by phase, so that a person can be told of each. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ..load import LoadedEngine, load_engine
from ..metrics import Metrics
from ..model_source import open_source
from ..plan.budgets import Budgets
from ..plan.planner import Plan, Settings, make_plan
from ..rehearsal import rehearse
from ..text.tokenizer import Tokenizer
from ..weights.making import store_for
from .answers import Answers
from .encode import RowEncoder
from .measure import JobSize, measure
from .outputs import claim_output
from .preflight import preflight
from .reader import read_rows
from .refusals import InputRefused
from .report import summarise
from .rows import BadRow, Defaults, Row
from .run import Job, JobCounts
from .summary import RunSummary, Seconds
from .writer import OrderedWriter


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What the user asked for; `model` is a folder, a store or a hub id."""

    model: str
    input: Path
    output: Path
    settings: Settings = field(default_factory=Settings)
    defaults: Defaults = field(default_factory=Defaults)
    budgets: Budgets = field(default_factory=Budgets)
    lenient: bool = False


class BatchRun:
    """Phases in order: construct (files are checked), `measure`, `plan`, `load`, `passes`, then `finish` or `stop`.

    Use as a context manager: leaving it ends every process and thread, and discards what was not published.
    """

    def __init__(self, request: BatchRequest) -> None:
        self.request = request
        self.counts = JobCounts()
        self.seconds = Seconds()
        self._started = time.time()
        with ExitStack() as resources:
            self.source = resources.enter_context(open_source(request.model))
            self.paths = claim_output(request.output, request.input, self.source.folder)
            self.preflight = preflight(request.input, request.defaults)
            if self.preflight.refused(request.lenient):
                raise InputRefused(self.preflight.report(request.lenient))
            self._resources = resources.pop_all()

    def measure(self) -> JobSize:
        """Tokenizes every row once: what is too long is known before a weight is loaded."""
        shape = self.source.shape
        self._tokenizer = self._resources.enter_context(Tokenizer.load(self.source.folder))
        self.size = measure(self._rows(), RowEncoder(self._tokenizer, shape.vocab, shape.context))
        return self.size

    def plan(self) -> Plan:
        self._job = self.size.shape()
        settings = self.source.settle(self.request.settings)
        self._plan = make_plan(self.source.shape, settings, self.request.budgets.host_nbytes(), self._job)
        return self._plan

    def load(self) -> LoadedEngine:
        """Weights into memory, from a store where they do not fit; the store is made first where it is missing.

        Ends with a rehearsal of the worst pass.
        """
        begun = time.perf_counter()
        store = store_for(self.source, self._plan, self.request.budgets)
        self._loaded = load_engine(self.source, self._plan, store)
        self._resources.callback(self._loaded.close)
        rehearse(self._loaded.engine, self._plan, self._job)
        if self._loaded.streamed is not None:
            self._loaded.streamed.start_counting()
        self.seconds.load = time.perf_counter() - begun
        self._writer = self._resources.enter_context(OrderedWriter(self.paths))
        return self._loaded

    @property
    def metrics(self) -> Metrics:
        return self._loaded.engine.metrics

    def passes(self) -> Iterator[JobCounts]:
        """Runs the job, a pass per iteration."""
        begun, shape = time.perf_counter(), self.source.shape
        encoder = RowEncoder(self._tokenizer, shape.vocab, shape.context, self._plan.kv_tokens)
        job = Job(self._loaded.engine, encoder, Answers(self.request.model, int(self._started)), self._writer)
        self.counts = job.counts
        for counts in job.run(self._rows()):
            self.seconds.generate = time.perf_counter() - begun
            yield counts

    def finish(self) -> RunSummary:
        """Publishes the output files and sums up."""
        self._writer.finish(self.preflight.num_rows)
        return self._sum_up()

    def stop(self) -> RunSummary:
        """Publishes what is finished as the partial file, and sums up."""
        self._writer.finish_partial()
        return self._sum_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def _rows(self) -> Iterator[Row | BadRow]:
        return read_rows(self.request.input, self.request.defaults)

    def _sum_up(self) -> RunSummary:
        self.seconds.total = time.time() - self._started
        return summarise(self.source, self._plan, self._loaded, self.counts, self.seconds)
