"""`run_batch`: the job behind `moedge batch`, and the walk through its states that both of them take.

Torch-free until the input is checked: what is refused is refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from ...offload.memory import reset_host_peak
from ..jobs.answer_stream import STDOUT
from ..jobs.request import BatchRequest, ResumeOptions, cluster_request
from ..jobs.session import Checked, Ended
from ..sampling.model_defaults import unset_names
from ..settings.applications import hooks
from ..settings.errors import BadArgument, SettingError
from ..settings.option import check, with_options
from ..settings.options import BatchOptions
from ..settings.stages import stage
from .options import budgets_of, experts_of, input_format_of, limits_of, row_defaults_of, settings_of

if TYPE_CHECKING:
    from ..engine.engine import Metrics
    from ..jobs.job import Executor, Measured, Planned, Running
    from ..jobs.summary import RunSummary
    from ..loading.engine_loader import LoadedModel


class Cluster(Protocol):
    """Workers elsewhere, which an application starts and which stay loaded from one job to the next."""

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence that every worker has memory for; None before the first job."""
        ...

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
    with stage("importing torch"):
        from ..jobs.job import Measured
    with stage("counting tokens"):
        measured = Measured.of(checked)
    observer.measured(measured)
    cluster = None if checked.request.cluster is None else resources.enter_context(cluster_of(measured))
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
        from ..jobs.job_plan import refuse_too_small

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
    running = loaded.run()
    with observer.working():
        return running.end(_passes(running, observer))


def _passes(running: Running, observer: JobObserver) -> str | None:
    """Why the observer stopped the job; None where it did not."""
    with observer.running(running):
        for _ in running.passes():
            reason = observer.after_pass(running)
            if reason is not None:
                return reason
    return None


class BatchProgress(JobObserver):
    """A bar where it is wanted, and a stop after the pass in which Ctrl-C was pressed."""

    def __init__(self, wanted: bool) -> None:
        from .generation import DeferredInterrupt

        self._wanted = wanted
        self._interrupt = DeferredInterrupt()
        self._advance: Callable[[int, Metrics], None] | None = None
        self._done = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        with self._interrupt:
            yield

    @contextmanager
    def running(self, running: Running) -> Iterator[None]:
        from .generation import progress_bar

        eta = running.eta()
        self._done = eta.done
        with progress_bar(eta.total, self._wanted, "rows", done=eta.done) as self._advance:
            yield
            # The journal confirms the last rows after the last pass.
            self._show(running)

    def after_pass(self, running: Running) -> str | None:
        self._show(running)
        return "signal" if self._interrupt.requested else None

    def _show(self, running: Running) -> None:
        done = running.session.num_confirmed
        if self._advance is not None:
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
    from .model import refuse_over_budget

    refuse_over_budget(ended.over_budget, ended.summary)
    return ended.summary


def batch_request(
    model: str | Path, input_file: str | Path, output: str | Path, **options: Unpack[BatchOptions]
) -> BatchRequest:
    """The request that a call of `run_batch` makes. Raises BadArgument."""
    check(options, BatchOptions)
    if str(output) == STDOUT:
        raise BadArgument('output "-" is for the command; give a file')
    return request_of(model, input_file, output, options)


def request_of(
    model: str | Path, input_file: str | Path, output: str | Path, options: Mapping[str, Any]
) -> BatchRequest:
    """The request that these of `BatchOptions` make, for `run_batch` and the command. Other names are ignored."""
    drift, plan = options.get("accept_drift"), options.get("plan")
    return BatchRequest(
        model=str(model),
        input=Path(input_file),
        output=Path(output),
        settings=settings_of(options),
        defaults=row_defaults_of(options),
        input_format=input_format_of(options),
        unset=unset_names(options.get("temperature")),
        budgets=budgets_of(options),
        experts=experts_of(options),
        limits=limits_of(options),
        lenient=options.get("lenient", False),
        csv_safe=options.get("csv_safe", False),
        resume=ResumeOptions(
            drift=(drift,) if isinstance(drift, str) else tuple(drift or ()),
            overwrite=options.get("overwrite", False),
            failed=options.get("failed", False),
        ),
        plan=None if plan is None else Path(plan),
        cluster=cluster_request(options.get("ray"), options.get("ray_workers")),
    )
