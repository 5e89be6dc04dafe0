"""A batch job as a person sees it on the terminal: its phases, its progress, its numbers. All of it on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from ...runtime.jobs.batch_run import BatchRun
from ...runtime.jobs.eta import Eta, Work
from ...runtime.jobs.request import BatchRequest
from ...runtime.jobs.summary import Percentiles, RunSummary
from ...runtime.plan.placement import Plan
from ...runtime.plan.planner import PlanResult
from ..options.exit_codes import ExitCode
from ..options.options import Format, Progress
from ..options.signals import Stopped, StopSignals
from .formatting import duration, gib
from .progress import BarProgress, EventProgress, Events, NoProgress, PlainProgress, ProgressView, SafeStream


def summary_table(summary: RunSummary) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for label, text in _lines(summary):
        table.add_row(label, text, style=None)
    return table


def _lines(summary: RunSummary) -> list[tuple[str, str]]:
    rows, tokens, speed = summary.rows, summary.tokens, summary.throughput
    host, kv, latency = summary.memory.host, summary.kv, summary.latency
    return [
        ("rows", f"{rows.ok:,} answered, {rows.failed:,} failed"),
        ("tokens", f"{tokens.generated:,} generated, {tokens.prompt:,} prompt"),
        ("speed", f"{speed.generated_tok_s or 0:,.1f} tok/s out, {speed.prompt_tok_s or 0:,.1f} in"),
        ("time", f"{duration(summary.seconds.total or 0)}, of which loading {duration(summary.seconds.load or 0)}"),
        ("first token", _spread(latency.ttft_s)),
        ("per token", _spread(latency.tpot_s)),
        ("passes", f"{summary.passes.count:,} of {summary.passes.sequences_mean or 0:,.1f} sequences"),
        ("memory", f"peak {gib(host.peak or 0)} of {gib(host.budget or 0)}"),
        *_device(summary),
        ("disk", f"{gib(summary.bytes.disk_to_host or 0)} read while generating"),
        ("KV cache", f"{kv.format}, {kv.blocks:,} blocks of {kv.block} tokens, {kv.waste or 0:.1%} wasted"),
        ("reuse", f"{kv.prefix_hit_tokens or 0:,} prompt tokens were in the cache; {kv.preemptions} preemptions"),
        ("weights", ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in (summary.weights.packed or {}).items())),
    ]


def _device(summary: RunSummary) -> list[tuple[str, str]]:
    device, copied = summary.memory.device, summary.bytes.host_to_device
    if device is None:
        return []
    return [
        ("GPU memory", f"peak {gib(device.peak or 0)} of {gib(device.budget or 0)}"),
        ("link", f"{gib(copied or 0)} copied to the GPU while generating"),
    ]


def _spread(values: Percentiles) -> str:
    if values.p50 is None or values.p99 is None:
        return "no row was answered"
    return f"{values.p50:.3f} s median, {values.p99:.3f} s for the slowest in a hundred"


class JobView:
    """Runs a job and says what it does, in the style that was asked for."""

    def __init__(self, progress: Progress, quiet: bool, output_format: Format = Format.HUMAN) -> None:
        as_json = output_format is Format.JSON
        stderr = cast(Any, SafeStream(sys.stderr))
        self._console = Console(file=stderr, quiet=quiet or as_json, highlight=False)
        self._style = Progress.NONE if quiet or as_json else progress
        self._events = Events(as_json)

    def run(self, request: BatchRequest, summary_path: Path | None) -> ExitCode:
        with StopSignals() as signals:
            try:
                return self._run(request, summary_path, signals)
            except Stopped as stopped:
                self._say("stopped before a row was in work")
                self._events.emit("stopped", reason="signal", id=None, done=0)
                return stopped.code

    def _run(self, request: BatchRequest, summary_path: Path | None, signals: StopSignals) -> ExitCode:
        with BatchRun(request) as run:
            if not run.finished:
                self._prepare(run)
            with signals.deferred():
                if not run.finished:
                    self._generate(run, signals)
                reason = "signal" if signals.requested is not None else run.stopped_because
                summary = run.finish() if reason is None else run.stop(reason)
        if summary_path is not None:
            summary.write(summary_path)
        if summary.passes.count is not None:
            self._console.print(summary_table(summary))
        if reason is None:
            return self._conclude(run, summary)
        return self._stopped(run, summary, reason, signals.requested or ExitCode.STOPPED)

    def _prepare(self, run: BatchRun) -> None:
        checked, done = run.preflight, run.ledger.num_done
        self._say(checked.report(run.request.lenient))
        if run.ledger.resumed:
            left = checked.num_rows - done
            self._say(f"going on with job {run.ledger.job_id}: {done:,} rows done, {left:,} to do")
        size = run.measure()
        self._say(f"{size.prompt_tokens:,} prompt tokens, at most {size.max_generated_tokens:,} to generate")
        if size.too_long:
            self._say(
                f"{size.too_long:,} rows are longer than the context of {run.source.shape.context:,} tokens: error rows"
            )
        plan = run.plan()
        if failing := size.longer_than(plan.kv_tokens):
            self._say(
                f"{failing:,} rows may need more than the {plan.kv_tokens:,} tokens that fit: error rows; "
                f"every row takes {run.for_every_row}"
            )
        self._events.emit(
            "job",
            id=run.ledger.job_id,
            folder=str(run.ledger.folder.path),
            rows=checked.num_rows,
            done=done,
            prompt_tokens=size.prompt_tokens,
            max_generated_tokens=size.max_generated_tokens,
            too_long=size.too_long,
            plan=plan.as_dict(),
        )
        self._say(
            f"weights {plan.quant} {gib(plan.weights_nbytes)}, KV cache {plan.kv} {gib(plan.kv_nbytes)} for "
            f"{plan.kv_sequences:,} sequences at their longest, within {_budgets(plan)}; arithmetic {plan.dtype}; "
            f"{plan.tokens_per_pass:,} tokens a pass"
        )
        if streamed := plan.weights_nbytes - plan.held_nbytes:
            self._say(f"{gib(plan.held_nbytes)} of weights are held, {_way(plan, streamed)} in every pass")
        for line in _expectation(run.planned):
            self._say(line)
        run.load()
        self._say_given_up(run, 0)
        self._say(f"loaded in {duration(run.seconds.load or 0)}")
        self._events.emit("loaded", seconds=run.seconds.load)

    def _generate(self, run: BatchRun, signals: StopSignals) -> None:
        size, done = run.size, run.ledger.num_done
        tokens_per_pass = run.plan_made.tokens_per_pass
        pace = Eta(Work(run.preflight.num_rows, done, size.prompt_tokens, size.max_generated_tokens, tokens_per_pass))
        with self._progress(pace.total) as progress:
            told = len(run.concessions.made)
            for _ in run.passes():
                told = self._say_given_up(run, told)
                committed = run.ledger.committed
                pace.update(committed.ok + committed.failed, committed.failed, run.metrics)
                progress.show(pace)
                if signals.requested is not None:
                    self._say("stopping after this pass; once more to leave at once")
                    return

    def _say_given_up(self, run: BatchRun, told: int) -> int:
        """What was given up since so many concessions were told; returns how many are now."""
        for each in run.concessions.made[told:]:
            self._say(str(each))
            self._events.emit("given_up", what=each.what, before=each.before, after=each.after, cause=each.cause)
        return len(run.concessions.made)

    def _progress(self, total: int) -> ProgressView:
        style = self._style
        if self._events.wanted:
            return EventProgress(self._events)
        if style is Progress.AUTO:
            style = Progress.BAR if self._console.is_terminal else Progress.PLAIN
        if style is Progress.BAR:
            return BarProgress(self._console, total)
        return PlainProgress(self._console) if style is Progress.PLAIN else NoProgress()

    def _conclude(self, run: BatchRun, summary: RunSummary) -> ExitCode:
        rows = summary.rows
        self._events.emit("finished", ok=rows.ok, failed=rows.failed, output=str(run.paths.out))
        if over := run.over_budget:
            for tier in over:
                self._say(
                    f"over budget: {gib(tier.peak or 0)} of {tier.tier} memory were used, "
                    f"{gib(tier.budget or 0)} were granted"
                )
            return ExitCode.GAVE_OUT
        self._say(f"{rows.ok:,} answers are in {run.paths.out}")
        if rows.failed:
            self._say(
                f"{rows.failed:,} rows failed: {run.paths.errors} says why; "
                f"`moedge jobs resume {run.ledger.job_id} --failed` runs them again"
            )
            return ExitCode.SOME_ROWS_FAILED
        return ExitCode.OK

    def _stopped(self, run: BatchRun, summary: RunSummary, reason: str, code: ExitCode) -> ExitCode:
        self._say(f"stopped: {reason}; {summary.rows.total:,} finished rows are in {run.paths.partial}")
        self._say(f"the same command goes on, and so does `moedge jobs resume {run.ledger.job_id}`")
        self._events.emit("stopped", reason=reason, id=run.ledger.job_id, done=summary.rows.total)
        return code

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _expectation(planned: PlanResult) -> Iterator[str]:
    predicted, seconds = planned.prediction, planned.seconds
    measured = planned.request.costs.rates.measured
    slow = "" if measured else ", if this machine is a slow one: `moedge doctor` measures it"
    yield (
        f"expected: {predicted.generated_tok_s:,.1f} tok/s, {duration(predicted.seconds)} after loading, "
        f"waiting for {predicted.bottleneck}{slow}"
    )
    others = [
        f"{quant} {taken / predicted.seconds:.2f}" for quant, taken in seconds.items() if quant != planned.plan.quant
    ]
    if others:
        yield f"times as long in other weight formats: {', '.join(others)}"


def _budgets(plan: Plan) -> str:
    host, device = f"{gib(plan.budget.host_nbytes)} of host memory", plan.budget.device
    return host if device is None else f"{gib(device.nbytes)} of GPU memory and {host}"


def _way(plan: Plan, streamed: int) -> str:
    if plan.staging is None:
        return f"{gib(streamed)} are read from disk"
    return f"{gib(streamed)} copied to the GPU, {gib(plan.staging.disk_nbytes)} of them from disk,"
