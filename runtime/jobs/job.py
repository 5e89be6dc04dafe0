"""A batch job as a sequence of states: Checked, Measured, Planned, Loaded, Running, Ended. Prints nothing.

Each state is built from the one before by the method that is named after the step, so a job cannot be in two of them,
and what a state knows is what its class has. `Checked` (session.py, torch-free) is the context manager that frees
everything, except what it was given: a job may run on a `LoadedModel`, which stays open. `Measured.of` begins what
needs torch.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from array import array
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, Self, cast

from ...offload.device import Device
from ...offload.memory import Heap, host_resident
from ..engine.engine import Metrics
from ..loading.engine_loader import LoadedEngine, LoadedModel
from ..plan.fallback import FallbackPolicy
from ..plan.memory_ledger import TierLedger
from ..plan.placement import Plan, Workload
from ..plan.planner import PlanResult, SearchSpace
from ..rows.answer_formats import Answers
from ..rows.reader import RowFile, open_regular, plain, read_rows
from ..rows.row import RowFailure
from ..text.tokenizer import Tokenizer
from ..weights.key_offsets import KeyOffsets
from .encode import JobSize, RowEncoder, TokenSpool, measure
from .folder import now_text
from .job_plan import remember, with_workload
from .journal.run_log import RunLog
from .journal.state import Counts
from .lifecycle import load_model, plan_model, profile_model
from .outputs import AnswerStream, partial_file
from .report import expert_use, summarise
from .run import FileRows, RowRunner, RowSource, failed_row
from .session import Checked, Ended, JobClaim, JobSession, disk_errors
from .stop import StallGuard
from .summary import RunSummary, Seconds

_PIECE_NBYTES = 1 << 20


def seekable(path: Path, folder: Path) -> BufferedReader:
    """The rows as plain bytes, from the first one on; an unpacked copy has no name and goes with the process."""
    raw = open_regular(path)
    text = plain(raw)
    if text is raw:
        return raw
    unpacked = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the caller closes it)
    with raw:
        shutil.copyfileobj(text, unpacked, _PIECE_NBYTES)
    unpacked.seek(0)
    return cast(BufferedReader, unpacked)


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

    @classmethod
    def of(cls, checked: Checked) -> Self:
        """Tokenizes every row to be run: what is too long is known before a weight is loaded."""
        source, claim, given = checked.source, checked.claim, checked.given
        # Templates get the date at which the job began.
        opened = given.tokenizer.dated(claim.created) if given else Tokenizer.load(source.folder, claim.created)
        tokenizer = checked.resources.enter_context(opened)
        text = checked.resources.enter_context(seekable(claim.rows.path, claim.folder.path))
        file = RowFile(text, checked.preflight.index, checked.request.defaults)
        spool = TokenSpool(claim.folder.path, checked.preflight.num_rows)
        checked.resources.callback(spool.close)
        bad = set(checked.preflight.bad_rows)
        rows = (claim.earlier.longer(file.row(row)) for row in claim.rows_to_run() if row not in bad)
        encoder = RowEncoder(tokenizer, source.shape.vocab, source.shape.context, spool=spool)
        size, order = measure(rows, encoder, mixture=source.shape.num_experts > 0)
        spool.seal()
        if claim.job_id is None and checked.request.limits.max_rows is None:
            # A job that has begun has answers to come, or rows that were already counted as errors.
            size.refuse_most(checked.preflight, checked.request.lenient)
        return cls(checked, tokenizer, spool, file, size, array("Q", order.rows()), encoder.notes)

    def plan(self) -> Planned:
        """The job begins here: its first record says what "auto" became. An engine that was given keeps its plan.

        Raises DoesNotFit, SettingError, JobMismatch.
        """
        checked, workload, budgets = self.checked, self.size.shape(), self.checked.request.budgets
        if (given := checked.given) is not None:
            return self.planned(given.chosen, given.policy.plan, workload)
        device, chosen = plan_model(checked.source, checked.claim.settings, budgets, workload, checked.request.plan)
        return Planned(self, workload, chosen, checked.claim.begin(chosen.plan), device)

    def planned(self, chosen: PlanResult, plan: Plan, workload: Workload) -> Planned:
        """The job begins by a plan that was made before, or elsewhere."""
        chosen = with_workload(chosen, plan, workload)
        return Planned(self, workload, chosen, self.checked.claim.begin(chosen.plan))


@dataclass(frozen=True, slots=True)
class Planned:
    """The job is in its journal, and `chosen` says with what it is to run; on `device` if that is to be loaded here."""

    measured: Measured
    workload: Workload
    chosen: PlanResult
    session: JobSession
    device: Device | None = None

    @property
    def plan(self) -> Plan:
        return self.chosen.plan

    @property
    def for_every_row(self) -> str:
        """The least budget that leaves no row out, as an option."""
        return SearchSpace(self.chosen.request).for_every_row

    @property
    def answers(self) -> Answers:
        """Writes the job's answers and errors."""
        claim = self.session.claim
        return Answers(claim.model_name, int(claim.created.timestamp()), self.measured.tokenizer.token_text)

    def fail(self, failure: RowFailure, digest: str) -> None:
        """Records the error of a row, whose line `digest` identifies."""
        self.session.journal.done(failed_row(failure, self.answers, digest))

    def load(self) -> Loaded:
        """Weights into memory, from a store where they do not fit; the store is made first where it is missing.

        Ends with a rehearsal of the worst pass, and the engine is closed with the job. Of an engine that was given,
        only the counters are reset. Raises DoesNotFit, MemoryGaveOut.
        """
        begun, checked = time.perf_counter(), self.measured.checked
        source, request = checked.source, checked.request
        if (given := checked.given) is not None:
            given.engine.start_counting()
            return Loaded(self, given, 0.0)
        offsets = self.session.key_offsets(source.shape)
        tokenizer, planned = self.measured.tokenizer, (self.device, self.chosen)
        model = load_model(source, tokenizer, planned, request.budgets, request.stream, offsets)
        checked.resources.callback(model.engine.close)
        profile_model(model, self.workload)
        return Loaded(self, model, time.perf_counter() - begun)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine of `model` is ready for the first pass."""

    planned: Planned
    model: LoadedModel
    load_seconds: float

    @property
    def engine(self) -> LoadedEngine:
        return self.model.engine

    @property
    def policy(self) -> FallbackPolicy:
        """What memory made of the plan meanwhile."""
        return self.model.policy

    @property
    def metrics(self) -> Metrics:
        return self.engine.engine.metrics

    @property
    def num_workers(self) -> int | None:
        return None

    @property
    def expert_hit_rate(self) -> float | None:
        cache = self.engine.streamed.experts.cache
        return None if cache is None or not cache.counts.wanted else cache.counts.hits / cache.counts.wanted

    @property
    def key_offsets(self) -> KeyOffsets | None:
        return self.engine.key_offsets

    @property
    def loss(self) -> Mapping[str, float]:
        return self.engine.loss

    @property
    def over_budget(self) -> tuple[TierLedger, ...]:
        return tuple(self.engine.ledger.over_budget)

    @property
    def expert_use(self) -> list[list[int]] | None:
        return expert_use(self.engine)

    def passes(self, session: JobSession, rows: RowSource) -> Generator[None]:
        measured, claim, heap = self.planned.measured, session.claim, Heap()
        named = claim.model_name, claim.created
        runner = RowRunner.of(self.model, measured.tokenizer, named, session.journal, rows, measured.spool)

        def work() -> int:
            return self.metrics.passes + session.journal.state.counts.rows

        stalls = StallGuard(work, self.engine.streamed, session.folder.stacks)
        with stalls as guard, closing(guard.watched(runner.passes())) as passes:
            for _ in passes:
                heap.after_pass()
                yield

    def summary(self, counts: Counts, seconds: Seconds) -> RunSummary:
        checked, chosen = self.planned.measured.checked, self.planned.chosen
        found = summarise(self.model, chosen, counts, seconds)
        found.bytes.written = 0 if checked.given else self.model.nbytes_written
        took = self.load_seconds, seconds.generate or 0
        remember(chosen, checked.source, self.metrics, took, self.engine.ledger)
        return found


class Executor(Protocol):
    """What computes the rows of a job: the engine of a `Loaded`, or workers elsewhere. Its rates are of all of them."""

    @property
    def planned(self) -> Planned:
        """The state that it was loaded from."""

    @property
    def policy(self) -> FallbackPolicy:
        """What memory made of the plan, with every fallback so far."""

    @property
    def load_seconds(self) -> float:
        """How long loading took."""

    @property
    def metrics(self) -> Metrics:
        """The counters of its passes so far."""

    @property
    def num_workers(self) -> int | None:
        """Processes elsewhere that are ready to compute; None where this one computes."""

    @property
    def expert_hit_rate(self) -> float | None:
        """The share of the experts that rows were routed to which were in memory; None if all are held."""

    @property
    def key_offsets(self) -> KeyOffsets | None:
        """The offsets of quantized keys that its answers depend on."""

    @property
    def loss(self) -> Mapping[str, float]:
        """What weights lost that were packed again, by group."""

    @property
    def over_budget(self) -> tuple[TierLedger, ...]:
        """Tiers that used more memory than their budgets."""

    @property
    def expert_use(self) -> list[list[int]] | None:
        """How many tokens chose each expert, for each layer with experts; None where it is not known."""

    def passes(self, session: JobSession, rows: RowSource) -> Generator[None]:
        """Computes all rows, and writes their answers into the journal; between two passes its counters are current."""

    def summary(self, counts: Counts, seconds: Seconds) -> RunSummary:
        """The numbers of the run at its end."""


class Running:
    """Iterate `passes`, then call `end`. `stopped_because` says why the passes ended before the last row."""

    def __init__(self, loaded: Executor) -> None:
        """The rows are those of the input file that have no answer."""
        self.executor = loaded
        self.planned = loaded.planned
        self._checked = loaded.planned.measured.checked
        self.session = loaded.planned.session
        self.policy = loaded.policy
        self.stopped_because: str | None = None
        measured, claim = self.planned.measured, self._checked.claim
        invalid = set(self._checked.preflight.bad_rows).intersection(claim.rows_to_run())
        self._rows = FileRows(
            self.session.journal.state, measured.file, measured.order, _failures(claim, invalid), claim.earlier
        )
        self._seconds: float | None = None
        self._started = max(0.0, time.perf_counter() - self._checked.begun - loaded.load_seconds)
        self._log = RunLog(self.session.folder.runs)

    @property
    def metrics(self) -> Metrics:
        return self.executor.metrics

    @property
    def num_rows(self) -> int:
        """The rows of the job."""
        return self.session.journal.state.num_rows

    def passes(self) -> Generator[None]:
        """Runs the job, a pass per iteration, to its end or until `stopped_because` says why not."""
        begun, session = time.perf_counter(), self.session
        with session.working(self.executor.key_offsets), closing(self.executor.passes(session, self._rows)) as passes:
            partial = self._partial_file()
            self._log.begin(**self._beginning())
            for _ in passes:
                if partial is not None:
                    with disk_errors(self._checked.paths.partial):
                        partial.upto(self.session.folder.journal, self.session.journal.committed.end)
                self._seconds = time.perf_counter() - begun
                self._log.sample(self._sample)
                yield
                failed = session.journal.state.counts.failed
                self.stopped_because = self._checked.stop_rule.reason(failed, self.num_rows) or session.cancelled()
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
        summary = self._summary()
        self._log.sample(self._sample, last=True)
        self._log.end(reason=reason, summary=summary.as_dict(), experts=self.executor.expert_use)
        return Ended(self.session, self._checked.paths, summary, reason, self.executor.over_budget)

    def _partial_file(self) -> AnswerStream | None:
        """The file that grows with the answers, where it is asked for; closed with the job."""
        if not self._checked.request.follow:
            return None
        with disk_errors(self._checked.paths.partial):
            file = partial_file(self.session.journal, self.session.folder, self._checked.paths)
        self._checked.resources.callback(file.close)
        return file

    def _beginning(self) -> dict[str, Any]:
        counts, predicted = self.session.journal.state.counts, self.planned.chosen.prediction
        return {
            "at": now_text(),
            "rows": self.num_rows,
            "done": counts.rows,
            "load_s": self.executor.load_seconds,
            "predicted_tok_s": predicted.generated_tok_s,
            "predicted_s": predicted.seconds,
            "ram_budget": self.planned.plan.budget.host_nbytes,
        }

    def _sample(self) -> dict[str, Any]:
        counts, metrics = self.session.journal.state.counts, self.metrics
        return {
            "done": counts.rows,
            "failed": counts.failed,
            "generated": metrics.generated_tokens,
            "prompt": metrics.prompt_tokens,
            "ram": host_resident(),
        }

    def _summary(self) -> RunSummary:
        total = time.perf_counter() - self._checked.begun
        seconds = Seconds(self._started, self.executor.load_seconds, self._seconds, total)
        summary = self.executor.summary(self.session.journal.state.counts, seconds)
        summary.model = {**summary.model, "generation_config": dict(self._checked.sampling.values)}
        return summary


def _failures(claim: JobClaim, rows: Collection[int]) -> Iterator[RowFailure]:
    """Answers of rows that cannot run. The input is read again in order, because only that shows duplicate ids."""
    if rows:
        read = read_rows(claim.rows.path, claim.rows.defaults)
        yield from (row for row in read if isinstance(row, RowFailure) and row.index in rows)
