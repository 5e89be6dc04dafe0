"""A batch job as a person sees it on the terminal: its phases, its progress, its numbers. All of it on stderr."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..runtime.jobs.batch_run import BatchRequest, BatchRun
from ..runtime.jobs.summary import RunSummary
from ..runtime.pace import Pace
from .exit_codes import ExitCode
from .options import Progress
from .progress import BarProgress, NoProgress, PlainProgress, ProgressView
from .signals import StopSignals
from .summary_view import summary_table
from .wording import duration, gib


class JobView:
    """Runs a job and says what it does, in the style of progress that was asked for."""

    def __init__(self, progress: Progress, quiet: bool) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._style = Progress.NONE if quiet else progress

    def run(self, request: BatchRequest, summary_path: Path | None) -> ExitCode:
        with BatchRun(request) as run, StopSignals() as signals:
            self._prepare(run)
            self._generate(run, signals)
            stopped = signals.requested
            summary = run.finish() if stopped is None else run.stop()
        if summary_path is not None:
            summary.write(summary_path)
        self._console.print(summary_table(summary))
        return self._conclude(run, summary) if stopped is None else self._stopped(run, summary, stopped)

    def _prepare(self, run: BatchRun) -> None:
        self._say(run.preflight.report(run.request.lenient))
        size = run.measure()
        self._say(f"{size.prompt_tokens:,} prompt tokens, at most {size.max_generated_tokens:,} to generate")
        if size.too_long:
            self._say(
                f"{size.too_long:,} rows are longer than the context of {run.source.shape.context:,} tokens: error rows"
            )
        plan = run.plan()
        if failing := size.longer_than(plan.kv_tokens):
            self._say(f"{failing:,} rows may need more than the {plan.kv_tokens:,} tokens that fit: error rows")
        self._say(
            f"weights {plan.quant} {gib(plan.weights_nbytes)}, KV cache {plan.kv} {gib(plan.kv_nbytes)} for "
            f"{plan.kv_sequences:,} sequences at their longest, within {gib(plan.budget_nbytes)} of host "
            f"memory; arithmetic {plan.dtype}; {plan.tokens_per_pass:,} tokens a pass"
        )
        if plan.streams:
            streamed = plan.weights_nbytes - plan.held_nbytes
            self._say(f"{gib(plan.held_nbytes)} of weights are held, {gib(streamed)} are read from disk in every pass")
        run.load()
        self._say(f"loaded in {duration(run.seconds.load or 0)}")

    def _generate(self, run: BatchRun, signals: StopSignals) -> None:
        pace = Pace(run.preflight.num_rows)
        with self._progress(pace.total) as progress:
            for counts in run.passes():
                pace.update(counts.ok + counts.failed, run.metrics)
                progress.show(pace)
                if signals.requested is not None:
                    return

    def _progress(self, total: int) -> ProgressView:
        style = self._style
        if style is Progress.AUTO:
            style = Progress.BAR if self._console.is_terminal else Progress.PLAIN
        if style is Progress.BAR:
            return BarProgress(self._console, total)
        return PlainProgress(self._console) if style is Progress.PLAIN else NoProgress()

    def _conclude(self, run: BatchRun, summary: RunSummary) -> ExitCode:
        host = summary.memory.host
        if (host.peak or 0) > (host.budget or 0):
            self._say(
                f"over budget: {gib(host.peak or 0)} of host memory were used, {gib(host.budget or 0)} were granted"
            )
            return ExitCode.GAVE_OUT
        if summary.rows.failed:
            self._say(f"{summary.rows.failed:,} rows failed: {run.paths.errors} says why")
            return ExitCode.SOME_ROWS_FAILED
        return ExitCode.OK

    def _stopped(self, run: BatchRun, summary: RunSummary, code: ExitCode) -> ExitCode:
        self._say(f"stopped: {summary.rows.total:,} finished rows are in {run.paths.partial}")
        return code

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
