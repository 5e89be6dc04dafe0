"""A job on disk: the claim to an output, which refuses what must not start, and the session that works under it.

A claim holds the lock of the job's folder and writes nothing. `begin` makes a session of it: from then on there is a
journal, and the output can be published. Torch-free: what is refused is refused before torch is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...offload.atomic_file import AtomicFile, write_atomically
from ...offload.stream.stream import StreamBroken
from ..rows.preflight import Preflight, file_fingerprint, preflight
from ..rows.reader import STDIN, Fingerprint, RowIndex, open_input, packed, prefix_digest
from ..rows.row import Defaults
from ..rows.tables import InputFormat, convert, input_format
from ..sampling.model_defaults import ModelDefaults, model_defaults
from ..settings.errors import ExportFailed, InputChanged, InputUnreadable, JobMismatch, JournalFailed, Stalled, counted
from ..settings.settings import Settings
from ..source.model_source import ModelSource, open_source, public_name
from .folder import JobFolder, JobLock, now_text
from .journal.journal import EarlierRuns, Journal, read_answers
from .journal.state import FINISHED, JobState, read_state
from .outputs import OutputPaths, claim_output, export, export_partial, is_exported, refuse_foreign_outputs
from .request import (
    BatchRequest,
    Identity,
    identity,
    pin_settings,
    recall_offsets,
    resolved,
    settle_offsets,
    settled_rows,
)
from .status import register
from .stop import CrashMarker, StopRule, boot_id, last_ending, memory_kills

if TYPE_CHECKING:
    from ..loading.engine_loader import LoadedModel
    from ..plan.memory_ledger import TierLedger
    from ..plan.placement import Plan
    from ..shape.model_shape import ModelShape
    from ..weights.key_offsets import KeyOffsets
    from .summary import RunSummary

# Why a job stops that `moedge jobs cancel` asked to.
CANCELLED = "it was cancelled"
# What ends a process without a row being to blame.
_BLAMELESS = (JournalFailed, StreamBroken, Stalled, InputChanged, KeyboardInterrupt)


@contextmanager
def lock_folder(paths: OutputPaths) -> Iterator[JobFolder]:
    """The job's folder, locked; one without a job is removed at the end. Raises JobInUse, OutputRefused."""
    folder = JobFolder(paths.job)
    with ExitStack() as resources:
        lock = JobLock(folder)
        resources.callback(lock.close)
        resources.callback(folder.remove_unbegun)
        yield folder


_PIECE_NBYTES = 1 << 20


def regular_input(path: Path, folder: JobFolder) -> Path:
    """The file to read rows from: `path`, or what came through standard input, kept for as long as the job is.

    Raises InputChanged where the job was started with other rows from the pipe.
    """
    if os.fspath(path) != STDIN:
        return path
    if sys.stdin.isatty():
        raise InputUnreadable("standard input is a terminal; give a file, or pipe one in")
    with AtomicFile(folder.input) as file:
        with open_input(path) as raw:
            while data := raw.read(_PIECE_NBYTES):
                file.write(data)
        file.flush()
        if not folder.input.exists():
            file.publish()
        elif not file_fingerprint(folder.input).same_content(file_fingerprint(file.hidden)):
            raise InputChanged(
                "the rows from the pipe differ from those that this job was started with; pipe in the same rows, use "
                "`moedge jobs resume`, or start over with --overwrite"
            )
    return folder.input


def json_lines(path: Path, kind: InputFormat, folder: JobFolder) -> tuple[Path, str | None]:
    """The file to read rows from: `path`, or its rows as JSON lines, converted once and kept for as long as the job is;
    and the encoding of its text, None for UTF-8.

    A file that is what it was is not converted again. Raises InputRefused, InputUnreadable, MissingExtra.
    """
    if kind is InputFormat.JSONL:
        return path, None
    found = file_fingerprint(path)
    made_of = {"format": kind, "sha256": found.sha256, "nbytes": found.nbytes}
    if folder.rows.is_file() and folder.rows_of.is_file():
        kept = json.loads(folder.rows_of.read_bytes())
        if kept == made_of | {"encoding": kept.get("encoding")}:
            return folder.rows, kept["encoding"]
    # First: a kill between the two must not leave the mark of one file beside the rows of another.
    folder.rows_of.unlink(missing_ok=True)
    with AtomicFile(folder.rows) as file:
        encoding = convert(path, kind, file, "standard input" if path == folder.input else None)
        file.publish()
    write_atomically(folder.rows_of, json.dumps(made_of | {"encoding": encoding}).encode())
    return folder.rows, encoding


@dataclass(frozen=True, slots=True)
class JobInput:
    """The rows of a job: where they are, how absent fields are filled, and what the check of them found."""

    path: Path
    defaults: Defaults
    preflight: Preflight

    @classmethod
    def check(cls, request: BatchRequest, folder: JobFolder) -> Self:
        """Reads every row once, and keeps what comes through a pipe, or is converted to JSON lines.

        Raises InputUnreadable, InputChanged, InputRefused.
        """
        if request.resume.overwrite and os.fspath(request.input) == STDIN:
            # It is what came through the pipe the last time.
            folder.input.unlink(missing_ok=True)
        kind = input_format(request.input, request.input_format)
        path, encoding = json_lines(regular_input(request.input, folder), kind, folder)
        found = preflight(path, request.defaults)
        if os.fspath(request.input) == STDIN:
            found = replace(found, path="standard input")
        if kind is not InputFormat.JSONL:
            read_as = "" if encoding is None else f" (read as {encoding})"
            found = replace(found, path=f"{request.input}{read_as}", unit="row")
        return cls(path, request.defaults, found)

    def refuse_changed_meanwhile(self, folder: JobFolder, state: JobState) -> None:
        """Raises InputChanged as `refuse_other`, for rows that were written to since they were checked."""
        before, now = self.preflight.fingerprint, self.path.stat()
        if (now.st_size, now.st_mtime_ns) != (before.nbytes, before.mtime_ns):
            self.refuse_other(preflight(self.path, self.defaults), folder, state)

    def refuse_other(self, found: Preflight, folder: JobFolder, state: JobState) -> None:
        """Raises InputChanged where `found` are not the rows that the job was started with, naming the row."""
        opened = state.opened
        before = Fingerprint(**opened["input"], mtime_ns=0)
        if not found.fingerprint.same_content(before) and not self._grew(found, before, state.num_rows):
            raise InputChanged(
                f"{self.preflight.path} is not the input that job {opened['id']} was started with: "
                f"{_where_changed(found.index, folder, state)}. Put it back as it was, choose another output name, or "
                "start over with --overwrite"
            )

    def _grew(self, found: Preflight, before: Fingerprint, num_rows: int) -> bool:
        """Whether rows were added behind those of before and nothing else changed. Not looked for in packed files."""
        if found.num_rows <= num_rows or found.index.span(num_rows)[0] < before.nbytes:
            return False
        with self.path.open("rb") as file:
            return not packed(file) and prefix_digest(file, before.nbytes) == before.sha256


def _where_changed(rows: RowIndex, folder: JobFolder, state: JobState) -> str:
    for done in read_answers(folder.journal, state):
        if done.row >= len(rows):
            return f"it has {counted(len(rows), 'row')}, and row {done.row + 1:,} was answered"
        if done.input != rows.digest(done.row):
            return f"line {rows.line_number(done.row)} differs from the row that was answered"
    return "rows that have no answer yet were added, removed or edited"


def refuse_start_over(folder: JobFolder, paths: OutputPaths) -> None:
    """Raises JobMismatch, OutputExists where an output is not what the job in `folder` wrote."""
    if folder.begun:
        state = read_state(folder.journal)
        _refuse_other_output(folder, state, paths)
        refuse_foreign_outputs(state, paths)


def start_over(folder: JobFolder, paths: OutputPaths) -> None:
    """Removes the journal and the outputs of the job in `folder`, which is locked and keeps its lock and its rows."""
    if not folder.begun:
        return
    for path in (paths.out, paths.errors, paths.partial):
        path.unlink(missing_ok=True)
    kept = {folder.lock, folder.input, folder.rows, folder.rows_of}
    # The journal last: as long as it is there, the folder is that of a job.
    for path in sorted(folder.path.iterdir(), key=lambda each: each == folder.journal):
        if path not in kept and not path.is_dir():
            path.unlink()


def _refuse_other_output(folder: JobFolder, state: JobState, paths: OutputPaths) -> None:
    if str(paths.out.resolve()) != state.opened["request"]["output"]:
        raise JobMismatch(
            f"{folder.path} belongs to the output {state.opened['request']['output']}; choose another output name"
        )


class JobClaim:
    """The right to work on one output, before anything is written. Close it with the resources of the job.

    `created` and `model_name` are those of the job that is resumed, or of the one that would start now.
    """

    def __init__(
        self, request: BatchRequest, paths: OutputPaths, folder: JobFolder, rows: JobInput, identity: Identity
    ) -> None:
        """`rows` are checked and `folder` is locked. Raises JobMismatch, InputChanged, BadJournal, OtherVersion."""
        self.request = request
        self.paths = paths
        self.folder = folder
        self.rows = rows
        self._identity = identity
        self._journal = Journal(folder.journal, folder.ballast) if folder.begun else None
        self.created = datetime.now().replace(microsecond=0)
        self.model_name = public_name(request.model)
        self._retry: list[int] = []
        self.earlier = EarlierRuns()
        if self._journal is None:
            identity.refuse_unknown(request.resume.drift)
        else:
            try:
                self._check_resumable(self._journal.state)
            except BaseException:
                self.close()
                raise
            opened = self._journal.state.opened
            self.created, self.model_name = datetime.fromisoformat(opened["created_at"]), opened["model_name"]
            self._retry = self._journal.state.failed_rows if request.resume.failed else []
            asked = request.resume
            self.earlier = EarlierRuns(folder.journal, self._journal.state, asked.cut_to or 0, asked.cut_rows)

    @property
    def job_id(self) -> str | None:
        """The id of the resumed job; None for a new one."""
        return None if self._journal is None else str(self._journal.state.opened["id"])

    @property
    def facts(self) -> Mapping[str, Any]:
        """What answers depend on, by name, as far as it is known before the plan."""
        return self._identity.facts

    @property
    def finished(self) -> bool:
        if self._journal is None or self._retry or self.earlier.cut_rows:
            return False
        return self._journal.state.finished and not self.num_added

    @property
    def num_added(self) -> int:
        """Rows that were appended to the input of a job since it was run last."""
        return 0 if self._journal is None else max(0, self.rows.preflight.num_rows - self._journal.state.num_rows)

    @property
    def num_done(self) -> int:
        """Rows that have answers and will keep them."""
        if self._journal is None:
            return 0
        return self._journal.state.counts.rows - len(self._retry) - len(self.earlier.cut_rows)

    @property
    def settings(self) -> Settings:
        """The settings as resolved at the start of the job; as requested for a new job."""
        settings = self.request.settings
        return settings if self._journal is None else pin_settings(settings, self._journal.state.opened)

    def rows_to_run(self) -> Iterable[int]:
        """Rows of this run in input order, limited by --max-rows."""
        if self._journal is None:
            rows: Iterable[int] = range(self.rows.preflight.num_rows)
        else:
            known, now = self._journal.state.num_rows, self.rows.preflight.num_rows
            rows = merge(self._journal.state.pending(), self._retry, self.earlier.cut_rows, range(known, now))
        return islice(rows, self.request.limits.max_rows)

    def begin(self, plan: Plan) -> JobSession:
        """Writes the first record of a new job: what it is, and what "auto" became.

        Raises JobMismatch for a plan that would answer the rows of a resumed job in another way.
        """
        if self._journal is None:
            opened = self._opened(plan)
            self._journal = Journal.create(self.folder.journal, opened, self.folder.ballast)
            register(opened["id"], self.folder)
        self._identity.refuse_resolved(self._journal.state, resolved(plan), self.request.resume.drift, self.paths)
        if self.num_added:
            self._journal.extend(**self._input())
        return JobSession(self, self._journal, self._retry, plan)

    def session(self) -> JobSession:
        """Resumes an existing job; it needs no plan if no row is left to run."""
        assert self._journal is not None
        return JobSession(self, self._journal, self._retry)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _check_resumable(self, state: JobState) -> None:
        """Refuses a request for another job than the one that has this folder."""
        opened = state.opened
        _refuse_other_output(self.folder, state, self.paths)
        self.rows.refuse_other(self.rows.preflight, self.folder, state)
        asked = self.request.resume
        to_do = not state.finished or self.num_added > 0 or asked.failed or asked.cut_to is not None
        self._identity.refuse_other(state, self.request.settings, asked.drift, self.paths, to_do)
        if state.cancelled is not None and not self.request.resume.cancelled:
            raise JobMismatch(f"job {opened['id']} was cancelled; resume it with `moedge jobs resume {opened['id']}`")

    def _input(self) -> dict[str, Any]:
        """What the journal records of the input."""
        found = self.rows.preflight
        content = {"nbytes": found.fingerprint.nbytes, "sha256": found.fingerprint.sha256}
        return {"num_rows": found.num_rows, "input": content, "endpoints": found.rows}

    def _opened(self, plan: Plan) -> dict[str, Any]:
        name = os.fsencode(self.folder.path.resolve()) + f":{self.created}:{os.getpid()}".encode()
        return {
            "id": blake2b(name, digest_size=4).hexdigest(),
            "created_at": self.created.isoformat(),
            **self._input(),
            "identity": {**self._identity.facts, **resolved(plan)},
            "model_name": self.model_name,
            "request": self.request.as_json(),
        }


class JobSession:
    """A job with a journal: rows go into work and get answers, and the outputs are published."""

    def __init__(self, claim: JobClaim, journal: Journal, retry: list[int], plan: Plan | None = None) -> None:
        """`retry` are rows that failed and are run once more. The claim closes the journal.

        `plan` is that of this run, None where no row of it is left to run.
        """
        self.claim = claim
        self._plan = plan
        self.folder = claim.folder
        self.journal = journal
        self._retry = retry
        self._continued_before = journal.state.num_continued
        # Looked for after every pass: a path as text is found four times as fast.
        self._cancel = os.fspath(claim.folder.cancel)

    @property
    def job_id(self) -> str:
        return str(self.opened["id"])

    @property
    def opened(self) -> Mapping[str, Any]:
        """The first record."""
        return self.journal.state.opened

    @property
    def notes(self) -> Iterator[str]:
        """What is another thing than when the job began, and is not refused."""
        if self._plan is None:
            return
        plan, before = self._plan, self.opened["identity"]
        attention, compute = before["attention"], before["compute"]
        differ = "rows from here on may differ in tokens whose logits are nearly equal"
        if plan.attention != attention:
            yield f"attention is computed by {plan.attention}, and was by {attention} when the job began: {differ}"
        if plan.compute != compute:
            why = "its kernels are not usable here"
            yield f"compute is {plan.compute}, and was {compute} when the job began, but {why}: {differ}"

    @property
    def finished(self) -> bool:
        return self.journal.state.finished

    @property
    def num_confirmed(self) -> int:
        """Rows whose answer is on disk, less those that are still to be continued."""
        mark = self.journal.committed
        return mark.ok + mark.failed - len(self.claim.earlier.cut_rows) + mark.continued - self._continued_before

    def key_offsets(self, shape: ModelShape) -> KeyOffsets | None:
        """The offsets of quantized keys that the job has used so far, where they are known."""
        return recall_offsets(self.folder.path, self.journal.state.key_offsets, shape)

    @contextmanager
    def working(self, offsets: KeyOffsets | None) -> Iterator[None]:
        """Rows go into work while it is open; how it is left decides whether they are suspected.

        `offsets` of quantized keys are used from here on. Raises JobMismatch where the job has used others.
        """
        recorded = self.journal.state.key_offsets
        key_offsets = settle_offsets(self.folder.path, recorded, offsets, self.claim.request.resume.drift)
        ending = last_ending(self.journal.state, self.folder)
        self.folder.cancel.unlink(missing_ok=True)
        with CrashMarker(self.folder) as marker:
            cut_to = self.claim.request.resume.cut_to
            process = {"pid": os.getpid(), "boot": boot_id(), "memory_kills": memory_kills()}
            self.journal.start(ending, **process, at=now_text(), key_offsets=key_offsets, cut_to=cut_to)
            if self._retry:
                self.journal.retry(self._retry)
                self._retry = []
            try:
                yield
            except GeneratorExit:
                # Nobody asks for further passes; why is for them to say, with `stop`.
                raise
            except _BLAMELESS as error:
                with suppress(JournalFailed):
                    self.journal.stop(type(error).__name__)
                raise
            except BaseException:
                marker.keep(traceback.format_exc())
                raise

    def cancelled(self) -> str | None:
        """Why to stop, where somebody asked for it."""
        if not os.path.exists(self._cancel):
            return None
        self.folder.cancel.unlink(missing_ok=True)
        self.journal.cancel(at=now_text())
        return CANCELLED

    def finish(self) -> None:
        """Publishes the answers. Raises InputChanged where the input differs from the row that was answered."""
        state, paths = self.journal.state, self.claim.paths
        if not is_exported(state, paths):
            self.claim.rows.refuse_changed_meanwhile(self.folder, state)
            with disk_errors(paths.out):
                export(self.journal, self.folder, paths)
        if state.running:
            self.journal.stop(FINISHED)
        self.folder.ballast.unlink(missing_ok=True)

    def stop(self, reason: str) -> None:
        """Records a stop on purpose and publishes what is finished under the partial name."""
        self.journal.stop(reason)
        partial = self.claim.paths.partial
        with disk_errors(partial):
            export_partial(self.folder.journal, self.journal.state, partial)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises ExportFailed where `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise ExportFailed(
            f"{path} could not be written ({error.strerror}); every answer is safe in the journal. Free some disk "
            "space or look after the disk, then run the same command again"
        ) from error


@dataclass(frozen=True, slots=True)
class Checked:
    """The model's headers are read, the input is valid, and the output is claimed; nothing was written.

    `sampling` are those defaults of rows that the model sets. A job whose last row has its answer is `finished`: end it
    with `publish`. Every other is measured next. Leaving the context ends every process and thread of the job; every
    answer that was confirmed is kept. The job runs on `given`, or loads an engine of its own where that is None.
    """

    request: BatchRequest
    source: ModelSource
    claim: JobClaim
    stop_rule: StopRule
    resources: ExitStack
    begun: float
    sampling: ModelDefaults
    given: LoadedModel | None = None

    @classmethod
    def open(cls, request: BatchRequest, given: LoadedModel | None = None) -> Self:
        """Raises the errors of settings/errors.py for a model, an input, an output or limits that are refused."""
        stop_rule, begun = StopRule(request.limits), time.perf_counter()
        with ExitStack() as resources:
            if given:
                source = given.source
            else:
                source = resources.enter_context(open_source(request.model)).speculating(request.settings)
            sampling = model_defaults(source.folder).only(request.unset)
            request = replace(request, defaults=replace(request.defaults, **sampling.values))
            request = settled_rows(request, source.folder)
            paths = claim_output(request.output, request.input, source.folder)
            folder = resources.enter_context(lock_folder(paths))
            if request.resume.overwrite:
                # Before rows from a pipe replace those of the job.
                refuse_start_over(folder, paths)
            rows = JobInput.check(request, folder)
            if rows.preflight.refused(request.lenient):
                raise rows.preflight.refusal(request.lenient)
            if request.resume.overwrite:
                start_over(folder, paths)
            facts = identity(source, request.defaults, request.lenient)
            claim = JobClaim(request, paths, folder, rows, facts)
            resources.callback(claim.close)
            return cls(request, source, claim, stop_rule, resources.pop_all(), begun, sampling, given)

    @property
    def finished(self) -> bool:
        return self.claim.finished

    @property
    def preflight(self) -> Preflight:
        return self.claim.rows.preflight

    @property
    def paths(self) -> OutputPaths:
        return self.claim.paths

    def publish(self) -> Ended:
        """The end of a job that was finished before: its files are published where they are missing."""
        from .summary import summarise_rows

        session = self.claim.session()
        session.finish()
        return Ended(session, self.paths, summarise_rows(session.journal.state.counts))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.resources.close()


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a run: `reason` is None if every row has its answer, else it says why not.

    `over_budget` are the tiers of memory whose peak was above their budget.
    """

    session: JobSession
    paths: OutputPaths
    summary: RunSummary
    reason: str | None = None
    over_budget: tuple[TierLedger, ...] = ()

    @property
    def finished(self) -> bool:
        return self.session.finished
