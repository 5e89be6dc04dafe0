"""Shows a job over documents: the folder, every round as a batch job, and the table that came of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import islice

from ...offload.budget import gib
from ...offload.errors import ExitCode
from ...runtime.api.documents import DocumentsEnded, DocumentsObserver, run_documents_job
from ...runtime.documents.job import FolderReport
from ...runtime.documents.request import DocumentsRequest
from ...runtime.documents.table import Totals
from ...runtime.jobs.session import Checked
from ...runtime.settings.errors import counted
from ...runtime.settings.formatting import clock, duration, escape_controls
from ..options.options import Progress
from ..options.signals import Stopped
from .job_view import JobView, prefix_cache, summary_table

# Seconds between two lines while a folder is read.
_EVERY_SECONDS = 10.0
_MOST_KINDS = 8


class DocumentsView(JobView, DocumentsObserver):
    """Runs a job over documents and reports it."""

    def __init__(self, progress: Progress, quiet: bool) -> None:
        super().__init__(progress, quiet)
        self._next_line = time.monotonic() + _EVERY_SECONDS
        self._nbytes = 0

    def run_documents(self, request: DocumentsRequest) -> ExitCode:
        self._say("Everything stays on this machine.")
        begun = time.monotonic()
        with self._signals:
            try:
                ended = run_documents_job(request, self)
            except Stopped as stopped:
                self._say("Stopped. Start the same command again to continue.")
                return stopped.code
        for each in ended.rounds:
            if each.summary.passes.count is not None:
                self._console.print(summary_table(each.summary))
                self._say(f"prefix cache: {prefix_cache(each.summary)}")
                if (waited := each.summary.stalls.rows) is not None:
                    self._say(f"capacity for rows, and none read yet: {duration(waited)}")
        if ended.sample:
            self._say_sample(ended, time.monotonic() - begun)
        return self._outcome(ended)

    def reading(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _EVERY_SECONDS
            self._say(f"read {done:,} of {counted(total, 'file')}")

    def found(self, report: FolderReport) -> None:
        self._nbytes = report.nbytes
        skipped = f"; skipped: {_kinds(report.skipped.items())}" if report.skipped else ""
        self._say(f"found {counted(report.num_files, 'file')}: {_kinds(report.suffixes.items())}{skipped}")

    def read(self, report: FolderReport) -> None:
        if report.unread:
            self._say(
                f"{counted(report.unread.total(), 'file')} cannot be asked about: {_kinds(report.unread.items())}"
            )
        if report.changed or report.removed:
            self._say(f"since the last run: {report.new:,} new, {report.changed:,} changed, {report.removed:,} removed")
        if report.split:
            self._say(f"{counted(report.split, 'document')} split into chunks")

    def checked(self, checked: Checked) -> None:
        found, done = checked.preflight, checked.claim.num_done
        resumed = f", {done:,} of them done" if done else ""
        self._say(f"round {int(checked.paths.out.name.split('.')[0])}: {counted(found.num_rows, 'row')}{resumed}")

    def _say_sample(self, ended: DocumentsEnded, seconds: float) -> None:
        for row in ended.sample:
            error = row.get("error")
            text = f"{error['code']}: {error['message']}" if error else row.get("answer") or row.get("text")
            shown = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
            print(f"{escape_controls(row['id'])}\n  {escape_controls(shown)}")
        if ended.whole is not None:
            whole = ended.whole
            self._say(
                f"whole folder: about {counted(whole.rows, 'row')} with {whole.tokens:,} tokens, at most "
                f"{duration(whole.seconds)} at the rate of this sample, ready {clock(whole.seconds)}"
            )
        self._say(
            f"{counted(len(ended.sample), 'row')} tried in {duration(seconds)}, of {ended.report.num_files:,} files "
            f"with {gib(self._nbytes)}; the same command without --try keeps them and answers the others"
        )

    def _outcome(self, ended: DocumentsEnded) -> ExitCode:
        totals = ended.totals
        if any(each.over_budget for each in ended.rounds):
            self._say("over budget: more memory was used than granted; see the peaks above")
            return ExitCode.GAVE_OUT
        if ended.reason is not None:
            requested = self._signals.requested
            why = "Interrupted" if requested is not None else f"Stopped ({ended.reason})"
            self._say(
                f"{why}: {counted(totals.answered, 'row')} in {ended.paths.partial}, {totals.pending:,} documents left."
            )
            self._say("Start the same command again to continue.")
            return requested or ExitCode.STOPPED
        if not ended.sample:
            self._say(f"{counted(totals.answered, 'answer')} in {ended.paths.out}")
        self._say_quality(totals)
        if totals.num_failed:
            self._say(
                f"{counted(totals.num_failed, 'row')} failed: {_kinds(totals.failed.items())} ({ended.paths.errors})"
            )
            return ExitCode.SOME_ROWS_FAILED
        return ExitCode.OK

    def _say_quality(self, totals: Totals) -> None:
        if totals.cut:
            self._say(f"{counted(totals.cut, 'answer')} reached --max-tokens and may be cut")
        if totals.structured:
            rates = ", ".join(f"{name} {count / totals.structured:.1%}" for name, count in totals.filled.items())
            self._say(f"fields filled: {rates or 'none'}")
        elif totals.shortest:
            shortest = ", ".join(f"{escape_controls(name)} ({count})" for count, name in totals.shortest)
            self._say(f"shortest answers, in characters: {shortest}")
        if totals.quotes:
            self._say(f"{totals.quotes_found:,} of {counted(totals.quotes, 'quote')} found in their documents")


def _kinds(counts: Iterable[tuple[str, int]]) -> str:
    """`12 .pdf, 3 .docx`, the most frequent first."""
    every = sorted(counts, key=lambda item: (-item[1], item[0]))
    more = f", and {len(every) - _MOST_KINDS} more kinds" if len(every) > _MOST_KINDS else ""
    return ", ".join(f"{count:,} {kind}" for kind, count in islice(every, _MOST_KINDS)) + more
