"""Batch jobs one after the other, on an engine, or a cluster, that stays loaded between them.

Torch-free until the rows of the first job are checked.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self, cast

from ..jobs.folder import JobFolder
from ..jobs.journal.state import JobState, read_state
from ..jobs.request import BatchRequest, identity, pin_settings
from ..jobs.session import Checked, Ended
from ..jobs.stop import StopRule
from ..settings.stages import stage
from ..source.model_source import ModelSource
from .batch import Cluster, JobObserver, cluster_of, refuse_unreachable, run_loaded

if TYPE_CHECKING:
    # What is refused is refused before torch is imported.
    from ..jobs.job import Executor, Loaded, Measured
    from ..loading.engine_loader import LoadedModel


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
            from ..jobs.job_plan import refuse_too_small

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
        from ..jobs.job_plan import with_workload

        self._model = replace(loaded.model, chosen=with_workload(planned.chosen, plan, longest))

    def _load(self, checked: Checked) -> Executor:
        """On the engine of the jobs before, unless this one has a longer row than it has memory for."""
        observer, given = self._observer, self._model
        observer.checked(checked)
        if self._cluster is None:
            refuse_unreachable(checked)
        with stage("importing torch"):
            from ..jobs.job import Measured
        measured = Measured.of(replace(checked, given=given))
        observer.measured(measured)
        if checked.request.cluster is not None:
            return self._load_workers(measured)
        if given is not None and not measured.size.longer_than(given.longest):
            return measured.plan().load()
        self._held.close()
        self._model = None
        planned = replace(measured, checked=checked).plan()
        observer.planned(planned)
        loaded = planned.load()
        observer.loaded(loaded)
        return loaded

    def _load_workers(self, measured: Measured) -> Executor:
        """On the workers of the jobs before; the first job starts them."""
        if self._cluster is None:
            self._cluster = self._held.enter_context(cluster_of(measured))
        planned = self._cluster.plan(measured)
        self._observer.planned(planned)
        loaded = self._cluster.load(planned)
        self._observer.loaded(loaded)
        return loaded


def first_state(first: JobFolder | None) -> JobState | None:
    """What the journal of a job says, where it has begun."""
    return read_state(first.journal) if first is not None and first.begun else None
