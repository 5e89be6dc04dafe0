"""Shows a job over documents: the folder, every round as a batch job, and the table that came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ...cli.face import JobView, Stopped, prefix_cache, summary_table
from ...face import Checked, ExitCode, clock, counted, duration, escape_controls, gib, watching
from .job import FolderReport
from .request import DocumentsRequest
from .run import DocumentsEnded, DocumentsObserver, run_documents_job
from .table import Totals, may_change

if TYPE_CHECKING:
    from ...face import Running

# Seconds between two lines while a folder is read.
_EVERY_SECONDS = 10.0
_MOST_KINDS = 8
_AGAIN = "Start the same command again to continue."


class DocumentsView(JobView, DocumentsObserver):
    """Runs a job over documents and reports it."""

    def __init__(self, progress: str, quiet: bool, output_format: str = "human", *, verbose: bool = False) -> None:
        super().__init__(progress, quiet, output_format, verbose=verbose)
        self._next_line = time.monotonic() + _EVERY_SECONDS
        self._nbytes = self._round = 0
        self._num_read = ""

    def run_documents(self, request: DocumentsRequest, summary_path: Path | None = None) -> ExitCode:
        self._say("Everything stays on this machine.")
        begun = time.monotonic()
        with self._signals:
            try:
                with watching(self._stages()):
                    ended = run_documents_job(request, self)
            except Stopped as stopped:
                where = f"after round {self._round}" if self._round else "before the first row started"
                self._say(f"Stopped {where}{self._num_read}. Every answer is kept.")
                self._say(_AGAIN)
                self._events.emit("stopped", reason="signal", id=None, done=0)
                return stopped.code
            return self._report_documents(request, ended, summary_path, time.monotonic() - begun)

    def _report_documents(
        self, request: DocumentsRequest, ended: DocumentsEnded, summary_path: Path | None, seconds: float
    ) -> ExitCode:
        if summary_path is not None:
            ended.write(summary_path)
        for each in ended.rounds:
            if each.summary.passes.count is not None:
                self._console.print(summary_table(each.summary, self._verbose))
                self._say(f"prefix cache: {prefix_cache(each.summary)}")
        if ended.sample:
            self._say_sample(request, ended, seconds)
        return self._outcome(request, ended)

    def reading(self, done: int, total: int) -> None:
        self._num_read = f", {done:,} of {counted(total, 'file')} read"
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _EVERY_SECONDS
            self._say(f"read {done:,} of {counted(total, 'file')}")

    def found(self, report: FolderReport) -> None:
        self._nbytes = report.nbytes
        skipped = f"; skipped: {_kinds(report.skipped.items())}" if report.skipped else ""
        self._say(f"found {counted(report.num_files, 'file')}: {_kinds(report.suffixes.items())}{skipped}")
        self._events.emit(
            "folder", files=report.num_files, nbytes=report.nbytes, suffixes=report.suffixes, skipped=report.skipped
        )

    def read(self, report: FolderReport) -> None:
        if report.unread:
            self._say(
                f"{counted(report.unread.total(), 'file')} cannot be asked about: {_kinds(report.unread.items())}"
            )
        if report.changed or report.removed:
            self._say(f"since the last run: {report.new:,} new, {report.changed:,} changed, {report.removed:,} removed")
        if report.split:
            self._say(f"{counted(report.split, 'document')} split into chunks")
        self._events.emit(
            "read", new=report.new, changed=report.changed, removed=report.removed, split=report.split,
            errors=report.unread,
        )  # fmt: skip

    def checked(self, checked: Checked) -> None:
        found, done = checked.preflight, checked.claim.num_done
        self._round = int(checked.paths.out.name.split(".")[0])
        if checked.claim.job_id is None:
            self._say(f"round {self._round}: {counted(found.num_rows, 'row')}")
        else:
            self._say(f"resuming round {self._round}: {counted(done, 'row')} done, {found.num_rows - done:,} to do")
        self._events.emit("round", number=self._round, rows=found.num_rows, done=done)

    def _say_sample(self, request: DocumentsRequest, ended: DocumentsEnded, seconds: float) -> None:
        whole = ended.whole
        self._events.emit("sample", rows=list(ended.sample), whole=None if whole is None else asdict(whole))
        for row in () if self._events.wanted else ended.sample:
            error = row.get("error")
            text = f"{error['code']}: {error['message']}" if error else row.get("answer") or row.get("text")
            shown = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
            print(f"{escape_controls(row['id'])}\n  {escape_controls(shown)}")
        self._say(_tried(request, ended, seconds))
        if whole is not None:
            until = "" if request.batch.limits.until is None else f" (--until {request.batch.limits.until})"
            self._say(
                f"whole folder, {ended.report.num_files:,} files with {gib(self._nbytes)}: about "
                f"{counted(whole.rows, 'row')} with {whole.tokens:,} tokens, at most {duration(whole.seconds)} at the "
                f"rate of this sample, ready {clock(whole.seconds)}{until}"
            )

    def _outcome(self, request: DocumentsRequest, ended: DocumentsEnded) -> ExitCode:
        totals = ended.totals
        if any(each.over_budget for each in ended.rounds):
            self._say("over budget: more memory was used than granted; see the peaks above")
            return ExitCode.GAVE_OUT
        if ended.reason is not None:
            return self._early(ended, ended.reason)
        self._events.emit(
            "finished", ok=totals.answered, failed=totals.num_failed, cut=totals.cut, output=str(ended.paths.out),
            finish_reasons=totals.finish_reasons, errors=totals.failed,
        )  # fmt: skip
        if not ended.sample:
            self._say(f"{_counts(totals)}; in {ended.paths.out}")
            if self._verbose and totals.answered + totals.num_failed != totals.documents:
                self._say(f"of parts of documents: {counted(totals.answered, 'answer')}, {totals.num_failed:,} failed")
        self._say_quality(ended, request)
        if totals.num_failed:
            where = "" if ended.sample else f" ({ended.paths.errors})"
            self._say(f"errors: {_kinds(totals.failed.items())}{where}")
            if any(may_change(code) for code in totals.failed):
                self._say("The same command with --failed runs them again.")
        if not ended.sample:
            self._say(f"a page about the job: moedge report {ended.paths.out}")
        else:
            self._say("The same command without --try keeps these answers, and answers the other documents.")
        return ExitCode.SOME_ROWS_FAILED if totals.num_failed else ExitCode.OK

    def _early(self, ended: DocumentsEnded, reason: str) -> ExitCode:
        """Counts every document: with its rows, or without an answer."""
        totals, requested = ended.totals, self._signals.requested
        why = "Interrupted" if requested is not None else f"Stopped ({reason})"
        done_of = f"{totals.documents:,} of {counted(totals.documents + totals.pending, 'document')} done"
        where = "" if ended.sample else f" ({ended.paths.partial})"
        self._say(f"{why}: {done_of}{where}; {totals.pending:,} without an answer.")
        self._say(_AGAIN)
        job_id = ended.rounds[0].session.job_id if ended.rounds else None
        self._events.emit("stopped", reason=reason, id=job_id, done=totals.answered + totals.num_failed)
        return requested or ExitCode.STOPPED

    def _say_failed(self, running: Running) -> None:
        self._say(f"Failed in round {self._round}; every answer is kept in {running.session.folder.path}.")
        self._say(_AGAIN)

    def _say_quality(self, ended: DocumentsEnded, request: DocumentsRequest) -> None:
        totals, longest = ended.totals, request.batch.defaults.max_tokens
        if totals.cut:
            more = "continue with the same command and --cut" if request.sample is None else "try again with"
            self._say(
                f"{counted(totals.cut, 'answer')} reached --max-tokens {longest}; {more} --max-tokens {4 * longest}"
            )
        if totals.structured:
            rates = ", ".join(f"{name} {count / totals.structured:.1%}" for name, count in totals.filled.items())
            low = f" (low: {', '.join(totals.low)})" if totals.low else ""
            self._say(f"fields filled: {escape_controls(rates + low)}")
        elif totals.shortest:
            shortest = ", ".join(f"{escape_controls(name)} ({count})" for count, name in totals.shortest)
            self._say(f"shortest answers, in characters: {shortest}")
        if totals.quotes:
            self._say(f"{totals.quotes_found:,} of {counted(totals.quotes, 'quote')} found in their documents")


def _counts(totals: Totals) -> str:
    """`64 documents: 19 answered, 28 cut, 17 unreadable`."""
    kinds = ("answered", "cut", "failed", "unreadable")
    found = [f"{totals.outcomes[kind]:,} {kind}" for kind in kinds if totals.outcomes[kind] or kind == "answered"]
    return f"{counted(totals.documents, 'document')}: {', '.join(found)}"


def _tried(request: DocumentsRequest, ended: DocumentsEnded, seconds: float) -> str:
    """`5 tried in 14 s: 4 valid against the schema, 184 tokens in a typical answer, 1 reached --max-tokens 256`."""
    answered = [row for row in ended.sample if "error" not in row]
    valid = sum(isinstance(row.get("answer"), dict) for row in answered)
    parts = [f"{valid:,} valid against the schema" if request.question.schema else f"{len(answered):,} answered"]
    if answered:
        typical = median(row["usage"]["completion_tokens"] for row in answered)
        parts.append(f"{typical:,.0f} tokens in a typical answer")
    if ended.totals.cut:
        parts.append(f"{ended.totals.cut:,} reached --max-tokens {request.batch.defaults.max_tokens}")
    return f"{counted(len(ended.sample), 'row')} tried in {duration(seconds)}: {', '.join(parts)}"


def _kinds(counts: Iterable[tuple[str, int]]) -> str:
    """`12 .pdf, 3 .docx`, the most frequent first."""
    every = sorted(counts, key=lambda item: (-item[1], item[0]))
    more = f", and {len(every) - _MOST_KINDS} more kinds" if len(every) > _MOST_KINDS else ""
    return ", ".join(f"{count:,} {kind}" for kind, count in islice(every, _MOST_KINDS)) + more
