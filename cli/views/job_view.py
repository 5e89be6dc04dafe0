"""Shows a batch job on the terminal: its states, progress and numbers. Everything goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table

from ...batch import JobObserver, run_job
from ...energy import EnergyPrice, energy_lines
from ...formatting import duration, kernel_lines, loss_line, speed
from ...offload.budget import gib
from ...offload.errors import ExitCode
from ...runtime.calibration.machine_profile import is_outdated
from ...runtime.jobs.outputs import AnswerStream
from ...runtime.jobs.request import BatchRequest
from ...runtime.jobs.session import CANCELLED, Checked, Ended
from ...runtime.rows.row import ErrorCode
from ...runtime.settings.errors import counted
from ...runtime.settings.stages import Watcher, watching
from ...runtime.shape.shards import bits_lost
from ..options.signals import Stopped, StopSignals
from ..options.stdout import is_kept
from .eta import Eta, Work
from .progress import (
    BarProgress,
    EventProgress,
    Events,
    PlainProgress,
    Progress,
    SafeStream,
    bar_stage,
    plain_stage,
    say,
)

if TYPE_CHECKING:
    from ...runtime.jobs.job import Executor, Measured, Planned, Running
    from ...runtime.jobs.summary import Percentiles, Rows, RunSummary, Speculation
    from ...runtime.plan.fallback import FallbackPolicy
    from ...runtime.plan.placement import Plan
    from ...runtime.plan.planner import PlanResult


def summary_table(summary: RunSummary, verbose: bool = False) -> Table:
    """Four lines; with `verbose`, everything that a person may want to know of the engine."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for label, text in [*_lines(summary), *(_details(summary) if verbose else ())]:
        table.add_row(label, text, style=None)
    return table


def _lines(summary: RunSummary) -> list[tuple[str, str]]:
    rates, predicted, memory = summary.throughput, summary.predicted.generated_tok_s, summary.memory
    seconds = summary.seconds
    estimate = "" if predicted is None else f" (estimate {speed(predicted)})"
    peaks = [f"RAM peak {gib(memory.host.peak or 0)} of {gib(memory.host.budget or 0)}"]
    if memory.device is not None:
        peaks.append(f"GPU memory peak {gib(memory.device.peak or 0)} of {gib(memory.device.budget or 0)}")
    return [
        ("rows", _outcomes(summary.rows)),
        (
            "speed",
            f"{speed(rates.generated_tok_s or 0)} generated{estimate}, {speed(rates.prompt_tok_s or 0)} prompt",
        ),
        (
            "time",
            f"{duration(seconds.total or 0)}, of which {duration(seconds.start or 0)} to start and "
            f"{duration(seconds.load or 0)} to load",
        ),
        ("memory", ", ".join(peaks)),
        *_workers(summary),
    ]


def _workers(summary: RunSummary) -> list[tuple[str, str]]:
    """`3 answered 402 to 911 rows each`."""
    rows = [each.rows for each in summary.workers]
    if not rows:
        return []
    each = f"{counted(rows[0], 'row')}" if len(rows) == 1 else f"{min(rows):,} to {max(rows):,} rows each"
    return [("workers", f"{len(rows):,} answered {each}")]


def _outcomes(rows: Rows) -> str:
    """`288 answered (263 stop, 25 length), 12 failed (5 invalid_json_line, 7 invalid_value)`."""
    return f"{rows.ok:,} answered{_by_name(rows.finish_reasons)}, {rows.failed:,} failed{_by_name(rows.errors)}"


def _by_name(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {name}' for name, count in counts.items())})" if counts else ""


def _details(summary: RunSummary) -> list[tuple[str, str]]:
    tokens, kv, latency = summary.tokens, summary.kv, summary.latency
    return [
        ("tokens", f"{tokens.generated:,} generated, {tokens.prompt:,} prompt"),
        ("first token", _percentiles(latency.ttft_s)),
        ("per token", _percentiles(latency.tpot_s)),
        ("passes", f"{summary.passes.count:,}, {summary.passes.sequences_mean or 0:,.1f} sequences on average"),
        *_speculation(summary.speculation),
        *_link(summary),
        ("disk", f"{gib(summary.bytes.disk_to_host or 0)} read while generating"),
        ("KV cache", f"{kv.format}, {kv.blocks or 0:,} blocks of {kv.block} tokens, {kv.waste or 0:.1%} wasted"),
        ("prefix cache", prefix_cache(summary)),
        ("preemptions", f"{kv.preemptions or 0:,}"),
        ("weights", ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in (summary.weights.packed or {}).items())),
        *(("note", line) for line in summary.plan.get("notes", ())),
        *(("kernels", line) for line in kernel_lines(summary.plan.get("lacks", {}), ())),
    ]


def _speculation(found: Speculation) -> list[tuple[str, str]]:
    """`1.8 tokens a sequence and pass, 61% of 12,345 drafted accepted`."""
    if not found.drafted_tokens:
        return []
    accepted = (found.accepted_tokens or 0) / found.drafted_tokens
    each = f"{found.tokens_per_sequence_and_pass:.1f} tokens a sequence and pass"
    return [("speculation", f"{each}, {accepted:.0%} of {found.drafted_tokens:,} drafted accepted")]


def prefix_cache(summary: RunSummary) -> str:
    """`480 of 700 prompt tokens reused (69%)`."""
    hits = summary.kv.prefix_hit_tokens or 0
    # With what this run computed; `tokens.prompt` counts prompts of finished rows, over all runs of the job.
    total = hits + round((summary.throughput.prompt_tok_s or 0) * (summary.seconds.generate or 0))
    share = f" ({hits / total:.0%})" if total else ""
    return f"{hits:,} of {counted(total, 'prompt token')} reused{share}"


def _link(summary: RunSummary) -> list[tuple[str, str]]:
    if summary.memory.device is None:
        return []
    crossed, says = summary.bytes, ""
    if crossed.kv_to_device:
        says = f", {gib(crossed.kv_to_device)} of it keys and values; {gib(crossed.kv_to_host or 0)} of new ones back"
    return [("link", f"{gib(crossed.host_to_device or 0)} copied to the GPU while generating{says}")]


def _percentiles(values: Percentiles) -> str:
    if values.p50 is None or values.p99 is None:
        return "no row was answered"
    return f"p50 {values.p50:.3g} s, p99 {values.p99:.3g} s"


def _energy(price: EnergyPrice | None, summary: RunSummary, num_before: int) -> Iterator[str]:
    """Of a run that found `num_before` rows done; its rows have the tokens that the job's have on average."""
    rows = summary.rows.ok + summary.rows.failed
    if price is None or (done := rows - num_before) <= 0:
        return
    tokens = (count * done / rows for count in (summary.tokens.prompt, summary.tokens.generated))
    yield from energy_lines(price.of(summary.seconds.total or 0, done, *tokens))


class JobView(JobObserver):
    """Runs a job, state by state, and reports it in the requested style."""

    def __init__(
        self,
        progress: str,
        quiet: bool,
        output_format: str = "human",
        *,
        verbose: bool = False,
        answers: AnswerStream | None = None,
        energy: EnergyPrice | None = None,
        kept: bool = True,
    ) -> None:
        """`answers` also go there while the job runs; `verbose` shows all numbers of the run at its end, `energy` what
        the run took of it.

        A job that is not `kept` is removed when it has ended: nobody is sent to its files.
        """
        self._answers, self._energy = answers, energy
        self._kept = kept
        self._verbose = verbose
        as_json = output_format == "json"
        stderr = cast(Any, SafeStream(sys.stderr))
        self._console = Console(file=stderr, quiet=quiet or as_json, highlight=False)
        self._style = "none" if quiet or as_json else progress
        self._events = Events(as_json)
        self._signals = StopSignals()
        self._bar = Progress()
        self._eta: Eta | None = None
        self._num_rows = self._num_before = self._said = self._ram_nbytes = 0

    def run(self, request: BatchRequest, summary_path: Path | None) -> ExitCode:
        with self._signals:
            try:
                with watching(self._stages()):
                    ended = run_job(request, self)
            except Stopped as stopped:
                self._say("Stopped before the first row started; run the same command again to continue.")
                self._events.emit("stopped", reason="signal", id=None, done=0)
                return stopped.code
            return self._report(ended, summary_path)

    def _report(self, ended: Ended, summary_path: Path | None) -> ExitCode:
        if summary_path is not None:
            ended.summary.write(summary_path)
        if ended.summary.passes.count is not None:
            self._console.print(summary_table(ended.summary, self._verbose))
            for line in _energy(self._energy, ended.summary, self._num_before):
                self._say(line)
        if self._answers is not None:
            self._answers.upto(ended.session.folder.journal)
        return self._conclude(ended) if ended.reason is None else self._stopped(ended)

    def checked(self, checked: Checked) -> None:
        found, done = checked.preflight, checked.claim.num_done
        self._num_rows, self._num_before = found.num_rows, done
        self._say(found.report(checked.request.lenient))
        if checked.claim.job_id is not None:
            left = found.num_rows - done
            added = f" ({checked.claim.num_added:,} of them new)" if checked.claim.num_added else ""
            self._say(f"resuming job {checked.claim.job_id}: {counted(done, 'row')} done, {left:,} to do{added}")

    def measured(self, measured: Measured) -> None:
        self._say_size(measured)
        for note in (*_sampling(measured.checked), *measured.notes):
            self._say(note)

    def planned(self, planned: Planned) -> None:
        self._ram_nbytes = planned.plan.budget.host_nbytes
        self._say_plan(planned, planned.measured.checked.claim.num_done)

    def loaded(self, loaded: Executor) -> None:
        self._say_fallbacks(loaded.policy)
        bits = bits_lost(loaded.planned.measured.checked.source.shape, loaded.planned.plan.quant)
        if line := loss_line(loaded.loss, bits):
            self._say(line)
        self._say(f"loaded in {duration(loaded.load_seconds)}")
        self._events.emit("loaded", seconds=loaded.load_seconds)

    @contextmanager
    def working(self) -> Iterator[None]:
        with self._signals.deferred():
            yield

    @contextmanager
    def running(self, running: Running) -> Iterator[None]:
        self._eta = Eta(Work.of(running))
        try:
            with self._progress(self._eta.total) as self._bar:
                yield
        except Exception:
            # The error itself is printed last, by the command.
            self._say_failed(running)
            raise

    def after_pass(self, running: Running) -> str | None:
        assert self._eta is not None
        self._say_fallbacks(running.policy)
        session, executor = running.session, running.executor
        self._eta.workers = executor.num_workers
        committed = session.journal.committed
        self._eta.update(session.num_confirmed, committed.failed, running.metrics, executor.expert_hit_rate)
        self._bar.show(self._eta)
        if self._answers is not None:
            self._answers.upto(running.session.folder.journal, committed.end)
            if self._answers.closed:
                return "nobody reads standard output any more"
        if self._signals.requested is None:
            return None
        self._say("Stopping after this pass... (Ctrl-C again to quit now)")
        return "signal"

    def _say_failed(self, running: Running) -> None:
        session, rows = running.session, counted(self._num_rows, "row")
        self._say(f"Failed: {session.num_confirmed:,} of {rows} done, and kept in {session.folder.path}.")
        self._say(f"Resume with the same command, or: moedge jobs resume {session.job_id}")

    def _say_size(self, measured: Measured) -> None:
        size, context = measured.size, measured.checked.source.shape.context
        self._say(
            f"{counted(size.prompt_tokens, 'prompt token')}, up to {size.max_generated_tokens:,} generated tokens"
        )
        if size.too_long:
            self._say(f"{_are(size.too_long, 'row')} longer than the context of {context:,} tokens: error rows")

    def _say_plan(self, planned: Planned, done: int) -> None:
        plan, measured = planned.plan, planned.measured
        size = measured.size
        if failing := size.longer_than(plan.kv_tokens):
            self._say(
                f"{counted(failing, 'row')} may need more than the {plan.kv_tokens:,} tokens that fit: error rows; "
                f"{planned.for_every_row} runs all"
            )
        self._events.emit(
            "job",
            id=planned.session.job_id,
            folder=str(planned.session.folder.path),
            rows=measured.checked.preflight.num_rows,
            done=done,
            prompt_tokens=size.prompt_tokens,
            max_generated_tokens=size.max_generated_tokens,
            too_long=size.too_long,
            plan=plan.as_dict(),
        )
        # The others of a cluster plan their own memory.
        of_one = "" if measured.checked.request.cluster is None else " of one worker"
        self._say(f"plan{of_one}: {_plan_line(plan)}")
        for line in (*planned.session.notes, *kernel_lines(plan.lacks, plan.notes)):
            self._say(line)
        if streamed := plan.weights_nbytes - plan.held_nbytes:
            self._say(f"{gib(plan.held_nbytes)} of the weights stay in memory; every pass {_way(plan, streamed)}")
        for line in _estimate(planned.chosen, f"estimate{of_one}"):
            self._say(line)

    def _say_fallbacks(self, policy: FallbackPolicy) -> None:
        """Reports the fallbacks that were applied since the last call."""
        for each in policy.applied[self._said :]:
            self._say(str(each))
            self._events.emit("fallback", what=each.what, before=each.before, after=each.after, cause=each.cause)
        self._said = len(policy.applied)

    def _stages(self) -> Watcher | None:
        shown = {"bar": bar_stage, "plain": plain_stage}.get(self._shown)
        return shown and partial(shown, self._console)

    @property
    def _shown(self) -> str:
        """The style, with "auto" resolved by where it is shown."""
        if self._style != "auto":
            return self._style
        return "bar" if self._console.is_terminal else "plain"

    def _progress(self, total: int) -> Progress:
        if self._events.wanted:
            return EventProgress(self._events)
        if self._shown == "bar":
            return BarProgress(self._console, total, self._ram_nbytes)
        return PlainProgress(self._console, self._ram_nbytes) if self._shown == "plain" else Progress()

    def _conclude(self, ended: Ended) -> ExitCode:
        rows, paths = ended.summary.rows, ended.paths
        self._events.emit(
            "finished",
            ok=rows.ok,
            failed=rows.failed,
            cut=rows.cut,
            finish_reasons=rows.finish_reasons,
            errors=rows.errors,
            output=str(paths.out),
        )
        if ended.over_budget:
            for tier in ended.over_budget:
                name = "RAM" if tier.tier == "host" else "GPU memory"
                self._say(f"over budget: {gib(tier.peak or 0)} of {name} used, the budget is {gib(tier.budget or 0)}")
            return ExitCode.GAVE_OUT
        job_id = ended.session.job_id
        # Without a pass, the job had been finished before.
        if nothing_to_do := ended.summary.passes.count is None:
            self._say(f"Job {job_id} is already finished: {_outcomes(rows)}")
        if self._kept:
            self._say(f"{counted(rows.ok, 'answer')} in {paths.out if self._answers is None else 'standard output'}")
        if nothing_to_do:
            self._say("To run all rows again, give moedge batch --overwrite")
        for line in unfinished(ended) if self._kept and is_kept(paths.out) else ():
            self._say(line)
        return ExitCode.SOME_ROWS_FAILED if rows.failed else ExitCode.OK

    def _stopped(self, ended: Ended) -> ExitCode:
        done, job_id, requested = ended.summary.rows.total, ended.session.job_id, self._signals.requested
        why = "Interrupted" if requested is not None else f"Stopped ({ended.reason})"
        cancelled = requested is None and ended.reason == CANCELLED
        done_of = f"{done:,} of {counted(self._num_rows, 'row')} done ({ended.paths.partial})."
        self._say(f"{'Cancelled' if cancelled else why}: {done_of}")
        if unfinished := ended.session.journal.state.unfinished.values():
            tokens = sum(each.tokens for each in unfinished)
            self._say(f"Kept of {counted(len(unfinished), 'row')} in work: {counted(tokens, 'token')}.")
        command = f"moedge jobs resume {job_id}"
        # The same command is refused after a cancel, so that no cron job undoes it.
        self._say(f"Resume with: {command}" if cancelled else f"Resume with the same command, or: {command}")
        self._events.emit("stopped", reason=ended.reason, id=job_id, done=done)
        return requested or ExitCode.STOPPED

    def _say(self, text: str) -> None:
        say(self._console, text)


def unfinished(ended: Ended) -> Iterator[str]:
    """What became of rows that are not whole answers, and the commands that help."""
    rows, job_id = ended.summary.rows, ended.session.job_id
    if rows.failed:
        # The others fail again.
        retried = any(ErrorCode(name).may_change for name in rows.errors)
        command = f"; run again with: moedge jobs resume {job_id} --failed" if retried else ""
        yield f"{counted(rows.failed, 'row')} failed (see {ended.paths.errors}){command}"
    if rows.cut:
        # Four times the tokens of the longest one.
        most = 4 * ended.session.journal.state.longest_cut
        yield (
            f"{_were(rows.cut, 'row')} cut at max_tokens; continue with: "
            f"moedge jobs resume {job_id} --cut --max-tokens {most}"
        )


def _were(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'was' if number == 1 else 'were'}"


def _sampling(checked: Checked) -> Iterator[str]:
    if checked.sampling.values:
        yield f"sampling defaults from generation_config.json: {checked.sampling} (--temperature 0 is greedy)"
    yield from checked.sampling.ignored


def _are(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'}"


def _plan_line(plan: Plan) -> str:
    where = "CPU" if plan.staging is None else "GPU"
    packed = f"{plan.dtype} weights {gib(plan.weights_nbytes)} (not quantized)"
    weights = packed if plan.quant == "none" else f"{plan.quant} weights {gib(plan.weights_nbytes)}, {plan.dtype} dtype"
    weights += ", int8 activations" if plan.compute == "int8" else ""
    names = {"device": "GPU memory", "host": "RAM"}
    budgets = [f"{names[tier]} budget {gib(nbytes)}" for tier, nbytes in plan.budget.memory.items()]
    return (
        f"{where}, {weights}, {plan.kv} KV cache {gib(plan.kv_nbytes)} "
        f"({counted(plan.kv_sequences, 'sequence')}), {plan.tokens_per_pass:,} tokens per pass; {', '.join(budgets)}"
    )


def _estimate(chosen: PlanResult, name: str) -> Iterator[str]:
    predicted, seconds = chosen.prediction, chosen.seconds
    profile, measured = chosen.request.profile, ""
    if not chosen.request.costs.rates.measured:
        measured = " (default speeds; run `moedge doctor` once to measure this machine)"
    elif profile is not None and not chosen.request.elsewhere and is_outdated(profile):
        measured = " (speeds of other CPU kernels; run `moedge doctor` to measure those of this release)"
    yield (
        f"{name}: about {speed(predicted.generated_tok_s)}, {duration(predicted.seconds)}, "
        f"{predicted.bottleneck}-bound, after loading for ~{duration(predicted.loading_s)}{measured}"
    )
    if predicted.written_nbytes:
        yield f"loading writes {gib(predicted.written_nbytes)} of prepared weights to disk, once (--disk 0 writes none)"
    elif chosen.plan.streams and not chosen.ledger.tiers["disk"].planned and not chosen.request.prepared.is_model:
        yield "0 GiB to write: every pass reads the checkpoint's own files"
    now = seconds[chosen.plan.quant]
    times = {quant: taken / now for quant, taken in seconds.items() if quant != chosen.plan.quant}
    if others := [f"{quant} {factor:.1f}x" for quant, factor in times.items()]:
        yield f"estimated time with other formats: {', '.join(others)}"


def _way(plan: Plan, streamed: int) -> str:
    if plan.staging is None:
        return f"reads {gib(streamed)} from disk"
    from_disk = plan.staging.disk_nbytes
    return f"copies {gib(streamed)} to the GPU" + (f", {gib(from_disk)} of it from disk" if from_disk else "")
