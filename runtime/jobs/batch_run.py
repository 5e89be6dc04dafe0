"""A batch job from its files to its summary, phase by phase, so that a person can be told of each. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ...offload.memory import host_available
from ..load import LoadedEngine, load_engine
from ..metrics import Metrics
from ..planner import Plan, Settings, make_plan
from ..shape.folder import read_shape
from ..text.tokenizer import Tokenizer
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
    """What the user asked for; `model` is a checkpoint folder, `name` what the user called it."""

    model: Path
    name: str
    input: Path
    output: Path
    settings: Settings = field(default_factory=Settings)
    defaults: Defaults = field(default_factory=Defaults)
    lenient: bool = False


class BatchRun:
    """Phases in order: construct (files are checked), `measure`, `plan`, `load`, `passes`, then `finish` or `stop`.

    Use as a context manager: leaving it ends the tokenizer's process and discards what was not published.
    """

    def __init__(self, request: BatchRequest) -> None:
        self.request = request
        self.counts = JobCounts()
        self.seconds = Seconds()
        self._started = time.time()
        self._resources = ExitStack()
        self.paths = claim_output(request.output, request.input, request.model)
        self.shape = read_shape(request.model)
        self.preflight = preflight(request.input, request.defaults)
        if self.preflight.refused(request.lenient):
            raise InputRefused(self.preflight.report(request.lenient))

    def measure(self) -> JobSize:
        """Tokenizes every row once: what is too long is known before a weight is loaded."""
        self._tokenizer = self._resources.enter_context(Tokenizer.load(self.request.model))
        self.size = measure(self._rows(), RowEncoder(self._tokenizer, self.shape.vocab, self.shape.context))
        return self.size

    def plan(self) -> Plan:
        self._plan = make_plan(self.shape, self.request.settings, host_available(), self.size.longest)
        return self._plan

    def load(self) -> LoadedEngine:
        begun = time.perf_counter()
        self._loaded = load_engine(self.request.model, self.shape, self._plan)
        self.seconds.load = time.perf_counter() - begun
        self._writer = self._resources.enter_context(OrderedWriter(self.paths))
        return self._loaded

    @property
    def metrics(self) -> Metrics:
        return self._loaded.engine.metrics

    def passes(self) -> Iterator[JobCounts]:
        """Runs the job, a pass per iteration."""
        begun = time.perf_counter()
        encoder = RowEncoder(self._tokenizer, self.shape.vocab, self.shape.context, self._plan.kv_tokens)
        job = Job(self._loaded.engine, encoder, Answers(self.request.name, int(self._started)), self._writer)
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
        return summarise(self.request.name, self.shape, self._plan, self._loaded, self.counts, self.seconds)
