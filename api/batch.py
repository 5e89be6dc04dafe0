"""`run_batch`: the job behind `moedge batch`, the walk through its states that both of them take, and series of jobs on
an engine, or a cluster, that stays loaded between them.

Torch-free until the input is checked: what is refused is refused before torch is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, Unpack, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .formatting import speed
from .offload.memory import reset_host_peak
from .runtime.jobs.folder import JobFolder
from .runtime.jobs.journal.state import JobState, read_state
from .runtime.jobs.request import BatchRequest, identity, pin_settings, request_of
from .runtime.jobs.session import Checked, Ended
from .runtime.jobs.stop import DeferredInterrupt, StopRule
from .runtime.settings.applications import hooks
from .runtime.settings.errors import BadArgument, SettingError
from .runtime.settings.option import check, with_options
from .runtime.settings.options import BatchOptions
from .runtime.settings.stages import importing, stage
from .runtime.source.model_source import ModelSource

if TYPE_CHECKING:
    from .runtime.engine.engine import Metrics
    from .runtime.jobs.job import Executor, Loaded, Measured, Planned, Running
    from .runtime.jobs.summary import RunSummary
    from .runtime.loading.engine_loader import LoadedModel


class Cluster(Protocol):
    """Workers elsewhere, which an application starts and which stay loaded from one job to the next."""

    def plan(self, measured: Measured) -> Planned: ...

    def load(self, planned: Planned) -> Executor: ...


class JobObserver:
    """What follows a job from state to state; this one does nothing. Methods are called in the order of their names
    here, `after_pass` as often as there are passes."""

    def checked(self, checked: Checked) -> None:
        """The input is valid, and a row of it has no answer yet."""

    def measured(self, measured: Measured) -> None:
        """Every row is tokenized."""

    def planned(self, planned: Planned) -> None:
        """The job is begun."""

    def loaded(self, loaded: Executor) -> None:
        """The engine is ready."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """From the first pass, or the last check of a finished job, until the output is published."""
        yield

    @contextmanager
    def running(self, running: Running) -> Iterator[None]:
        """While passes run."""
        yield

    def after_pass(self, running: Running) -> str | None:
        """Why to stop now; None to continue."""
        return None


def run_job(request: BatchRequest, observer: JobObserver, given: LoadedModel | None = None) -> Ended:
    """The whole job: begun or resumed, run as far as its limits and `observer` let it, and published.

    It runs on `given`, or loads an engine of its own where that is None.
    """
    with ExitStack() as resources:
        # The hub's library shows its downloads itself.
        with stage(f"checking {request.input}") if Path(request.model).is_dir() else nullcontext():
            checked = resources.enter_context(Checked.open(request, given))
        if checked.finished:
            with observer.working():
                return checked.publish()
        return run_loaded(_load(checked, observer, resources), observer)


def _load(checked: Checked, observer: JobObserver, resources: ExitStack) -> Executor:
    observer.checked(checked)
    refuse_unreachable(checked)
    _refuse_too_small(checked)
    with importing("torch"):
        from .runtime.jobs.job import Measured
    with stage("counting tokens"):
        measured = Measured.of(checked)
    observer.measured(measured)
    cluster = None if checked.request.cluster is None else resources.enter_context(cluster_of(measured))
    return _load_measured(measured, observer, cluster)


def _load_measured(measured: Measured, observer: JobObserver, cluster: Cluster | None = None) -> Executor:
    """On the workers of `cluster`, or on an engine here."""
    planned = measured.plan() if cluster is None else cluster.plan(measured)
    observer.planned(planned)
    loaded: Executor = planned.load() if cluster is None else cluster.load(planned)
    observer.loaded(loaded)
    return loaded


def _refuse_too_small(checked: Checked) -> None:
    """Raises DoesNotFit where no row would fit. Workers have budgets of their own, a saved plan says what it needs."""
    request = checked.request
    if checked.given is None and request.cluster is None and request.plan is None:
        # Imports numpy, without which rows are refused.
        from .runtime.jobs.job_plan import refuse_too_small

        refuse_too_small(checked.source, checked.claim.settings, request.budgets)


def refuse_unreachable(checked: Checked) -> None:
    """Raises ClusterFailed where the cluster that a job is for does not answer, MissingExtra without Ray."""
    if checked.request.cluster is None:
        return
    found = hooks("refuse_unreachable")
    if not found:
        raise SettingError("--ray needs the application `cluster`, which is left out here; leave out --ray")
    with stage("connecting to the cluster"):
        found[0](checked.request.cluster.address)


def cluster_of(measured: Measured) -> AbstractContextManager[Cluster]:
    """The workers that the request of a job names. Raises ClusterFailed, MissingExtra, SettingError."""
    (open_cluster,) = hooks("open_cluster")
    found: AbstractContextManager[Cluster] = open_cluster(measured)
    return found


def run_loaded(loaded: Executor, observer: JobObserver) -> Ended:
    """All passes of a job whose engine is ready, and its output."""
    from .runtime.jobs.job import Running

    running = Running(loaded)
    with observer.working():
        return running.end(_passes(running, observer))


def _passes(running: Running, observer: JobObserver) -> str | None:
    """Why the observer stopped the job; None where it did not."""
    with observer.running(running), closing(running.passes()) as passes:
        for _ in passes:
            reason = observer.after_pass(running)
            if reason is not None:
                return reason
    return None


Advance = Callable[[int, "Metrics"], None]


@contextmanager
def progress_bar(total: int, wanted: bool, what: str = "prompts", done: int = 0) -> Iterator[Advance]:
    """A bar on stderr, or nothing; to be called with how many of `what` a pass finished."""
    if not wanted or not total:
        yield lambda count, metrics: None
        return
    columns = BarColumn(), MofNCompleteColumn(), TextColumn(f"{what}  {{task.description}}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task, begun = progress.add_task("starting", total=total, completed=done), time.perf_counter()

        def advance(count: int, metrics: Metrics) -> None:
            seconds = time.perf_counter() - begun
            tokens = f"{speed(metrics.generated_tokens / seconds)} out, {speed(metrics.prompt_tokens / seconds)} in"
            progress.update(task, advance=count, description=tokens)

        yield advance


class BatchProgress(JobObserver):
    """A bar where it is wanted, and a stop after the pass in which Ctrl-C was pressed."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._interrupt = DeferredInterrupt()
        self._advance: Advance = lambda count, metrics: None
        self._done = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        with self._interrupt:
            yield

    @contextmanager
    def running(self, running: Running) -> Iterator[None]:
        self._done = running.session.claim.num_done
        with progress_bar(running.num_rows, self._wanted, "rows", done=self._done) as self._advance:
            yield
            # The journal confirms the last rows after the last pass.
            self._show(running)

    def after_pass(self, running: Running) -> str | None:
        self._show(running)
        return "signal" if self._interrupt.requested else None

    def _show(self, running: Running) -> None:
        done = running.session.num_confirmed
        self._advance(done - self._done, running.metrics)
        self._done = done


@with_options(BatchOptions)
def run_batch(
    model: str | Path,
    input_file: str | Path,
    output: str | Path,
    *,
    progress: bool = True,
    **options: Unpack[BatchOptions],
) -> RunSummary:
    """Answers a file of prompts: the same job as `moedge batch model input_file -o output`, and resumed by it.

    `input_file` is JSON lines, CSV, Parquet, or another format of docs/batches.md. Every row gives one of `output`, or
    of its `.errors.jsonl`; what was answered is kept in its `.job` folder, so the same call resumes a job that was
    stopped or killed. The options are those of the command (`BatchOptions`). `progress` shows a bar on stderr.

    Returns the run in numbers (docs/reference.md): `rows.ok`, `rows.failed`, `tokens`, `seconds`, `memory`. Where a
    limit stopped the job, `rows.total` is less than the rows of the input.

    Raises what the command exits with: InputRefused, DoesNotFit, JobMismatch, OutputExists and others, all of them
    MoedgeErrors; OverBudget, whose `result` is the summary, where the output was written and more memory was used than
    the budget. Ctrl-C stops after the pass, keeps all answers, and raises KeyboardInterrupt.
    """
    request = batch_request(model, input_file, output, **options)
    reset_host_peak()
    ended = run_job(request, BatchProgress(progress))
    from .runtime.jobs.lifecycle import refuse_over_budget

    refuse_over_budget(ended.over_budget, ended.summary)
    return ended.summary


def batch_request(
    model: str | Path, input_file: str | Path, output: str | Path, **options: Unpack[BatchOptions]
) -> BatchRequest:
    """The request that a call of `run_batch` makes. Raises BadArgument."""
    check(options, BatchOptions)
    if str(output) == "-":
        raise BadArgument('output "-" is for the command; give a file')
    return request_of(model, input_file, output, options)


class JobSeries:
    """A context, which frees the engine. What `request` says of settings, budgets and limits is for all jobs together.

    `ended` are the jobs that were run.
    """

    def __init__(self, request: BatchRequest, observer: JobObserver) -> None:
        self.ended: list[Ended] = []
        self._request = request
        self._observer = observer
        self._held = ExitStack()
        self._model: LoadedModel | None = None
        self._cluster: Cluster | None = None
        self._stop_rule = StopRule(request.limits)
        self._rows_left = request.limits.max_rows

    def refuse_too_small(self, source: ModelSource) -> None:
        """Raises DoesNotFit where no row would fit. Workers have budgets of their own."""
        if self._request.cluster is None:
            from .runtime.jobs.job_plan import refuse_too_small

            refuse_too_small(source, self._request.settings, self._request.budgets)

    def open(self, request: BatchRequest, first: JobFolder | None) -> Checked:
        """The next job, checked and claimed, under the settings that the `first` of all jobs has resolved.

        Raises as `Checked.open`, and JobMismatch where the first was answered by another model, or otherwise.
        """
        state = first_state(first)
        settings = request.settings if state is None else pin_settings(request.settings, state.opened)
        limits = replace(request.limits, max_rows=self._rows_left)
        opened = Checked.open(replace(request, settings=settings, limits=limits))
        if state is not None:
            facts = identity(opened.source, opened.request.defaults, opened.request.lenient)
            accepted = self._request.resume.drift
            try:
                facts.refuse_other(state, self._request.settings, accepted, opened.paths, to_do=not opened.finished)
            except BaseException:
                opened.resources.close()
                raise
        return replace(opened, stop_rule=self._stop_rule)

    def run(self, checked: Checked) -> str | None:
        """Why the job stopped early; None where all of its rows have answers."""
        with ExitStack() as resources:
            resources.callback(checked.resources.close)
            done = checked.claim.num_done
            if checked.finished:
                with self._observer.working():
                    ended = checked.publish()
            else:
                loaded = self._load(checked)
                if self._model is None and checked.request.cluster is None:
                    # The first job of an engine stays open as long as the engine is in use.
                    self._hold(cast("Loaded", loaded), resources.pop_all())
                ended = run_loaded(loaded, self._observer)
        self.ended.append(ended)
        if self._rows_left is not None:
            self._rows_left -= ended.session.journal.state.counts.rows - done
            if self._rows_left <= 0 and ended.reason is None:
                return f"--max-rows {self._request.limits.max_rows:,} reached"
        return ended.reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _hold(self, loaded: Loaded, resources: ExitStack) -> None:
        self._held.push(resources)
        planned, plan = loaded.planned, loaded.policy.plan
        # Rows of later jobs may be as long as the cache allows.
        longest = replace(planned.workload, longest=plan.kv_tokens)
        from .runtime.jobs.job_plan import with_workload

        self._model = replace(loaded.model, chosen=with_workload(planned.chosen, plan, longest))

    def _load(self, checked: Checked) -> Executor:
        """On the engine of the jobs before, unless this one has a longer row than it has memory for."""
        observer, given = self._observer, self._model
        observer.checked(checked)
        if self._cluster is None:
            refuse_unreachable(checked)
        with importing("torch"):
            from .runtime.jobs.job import Measured
        measured = Measured.of(replace(checked, given=given))
        observer.measured(measured)
        if checked.request.cluster is not None:
            # The first job starts the workers.
            self._cluster = self._cluster or self._held.enter_context(cluster_of(measured))
            return _load_measured(measured, observer, self._cluster)
        if given is not None and not measured.size.longer_than(given.longest):
            return measured.plan().load()
        self._held.close()
        self._model = None
        return _load_measured(replace(measured, checked=checked), observer)


def first_state(first: JobFolder | None) -> JobState | None:
    """What the journal of a job says, where it has begun."""
    return read_state(first.journal) if first is not None and first.begun else None
