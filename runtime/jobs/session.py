"""A job's books: its folder, lock and journal, from the check of its input to the export of its answers."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any, Self

from ...offload.stream.lane import StreamBroken
from ..plan.plan import Plan, Settings
from ..rows.input_file import Fingerprint
from ..rows.preflight import Preflight, preflight
from ..rows.reader import RowIndex
from ..settings.errors import ExportFailed, InputChanged, InputRefused, JobMismatch, JournalFailed, Stalled
from ..shape.model_shape import ModelShape
from ..source.model_source import ModelSource
from ..weights.key_offsets import KeyOffsets
from .crash_marker import CrashMarker, boot_id, last_ending, memory_kills
from .export import export, export_partial, is_exported, read_answers
from .folder import JobFolder, JobLock, now_text, regular_input
from .identity import identity, recall, resolved, settle, settle_offsets
from .journal.committer import Mark
from .journal.journal import Journal
from .outputs import OutputPaths
from .request import BatchRequest
from .status import register

# What ends a process without a row being to blame.
_BLAMELESS = (JournalFailed, StreamBroken, Stalled, InputChanged, KeyboardInterrupt)


class JobSession:
    """Made for a request: refuses what must not start or go on, and writes nothing before `begin`."""

    def __init__(self, request: BatchRequest, paths: OutputPaths, source: ModelSource) -> None:
        self.folder = JobFolder(paths.job)
        # Looked for after every pass: a path in words is found four times as fast.
        self._cancel = os.fspath(self.folder.cancel)
        self.created = datetime.now().replace(microsecond=0)
        self.model_name = request.model
        self._request = request
        self._paths = paths
        self._journal: Journal | None = None
        self._retry: list[int] = []
        self._key_offsets: str | None = None
        with ExitStack() as resources:
            lock = JobLock(self.folder)
            resources.callback(lock.close)
            resources.callback(self.folder.remove_unbegun)
            self.input = regular_input(request.input, self.folder)
            self.preflight = self._read_input()
            if self.preflight.refused(request.lenient):
                raise InputRefused(self.preflight.report(request.lenient))
            self._identity = identity(source, request.defaults, request.lenient)
            if self.folder.begun:
                self._journal = resources.enter_context(Journal(self.folder.journal, self.folder.ballast))
                self._go_on()
            self._resources = resources.pop_all()

    @property
    def journal(self) -> Journal:
        assert self._journal is not None
        return self._journal

    @property
    def resumed(self) -> bool:
        """Whether the job was begun before."""
        return self._journal is not None

    @property
    def finished(self) -> bool:
        return self._journal is not None and self._journal.state.finished and not self._retry

    @property
    def num_done(self) -> int:
        """Rows that have answers and will keep them."""
        return self._journal.state.counts.rows - len(self._retry) if self._journal is not None else 0

    @property
    def committed(self) -> Mark:
        return self.journal.committed

    @property
    def job_id(self) -> str:
        return str(self.journal.state.opened["id"])

    def settings(self) -> Settings:
        """As they were resolved when the job began; as asked for where it has not."""
        settings = self._request.settings
        return settings if self._journal is None else settle(settings, self._journal.state.opened)

    def rows_to_run(self) -> Iterable[int]:
        """In the order of the input; as many as this run may take."""
        if self._journal is None:
            rows: Iterable[int] = range(self.preflight.num_rows)
        else:
            rows = merge(self._journal.state.pending(), self._retry)
        return islice(rows, self._request.limits.max_rows)

    def begin(self, plan: Plan) -> None:
        """Writes the first record of a new job: what it is, and what "auto" became."""
        if self._journal is None:
            opened = self._opened(plan)
            self._journal = self._resources.enter_context(
                Journal.create(self.folder.journal, opened, self.folder.ballast)
            )
            register(opened["id"], self.folder)

    def key_offsets(self, shape: ModelShape) -> KeyOffsets | None:
        """What quantized keys of the job are less, where that is known already."""
        return recall(self.folder.path, self.journal.state.key_offsets, shape)

    def settle_offsets(self, offsets: KeyOffsets | None) -> None:
        """`offsets` are used from here on. Raises JobMismatch where the job was begun with others."""
        recorded, drift = self.journal.state.key_offsets, self._request.go_on.drift
        self._key_offsets = settle_offsets(self.folder.path, recorded, offsets, drift)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Rows go into work while it is open; how it is left decides whether they are suspected."""
        ending = last_ending(self.journal.state, self.folder)
        self.folder.cancel.unlink(missing_ok=True)
        with CrashMarker(self.folder) as trace:
            self.journal.start(
                ending,
                pid=os.getpid(),
                boot=boot_id(),
                memory_kills=memory_kills(),
                at=now_text(),
                key_offsets=self._key_offsets,
            )
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
                trace.keep(traceback.format_exc())
                raise

    def cancelled(self) -> str | None:
        """Why to stop, where somebody asked for it."""
        if not os.path.exists(self._cancel):
            return None
        self.folder.cancel.unlink(missing_ok=True)
        self.journal.cancel(at=now_text())
        return "it was cancelled"

    def finish(self) -> None:
        """Publishes the answers. Raises InputChanged where the input is not what was answered."""
        if not is_exported(self.journal.state, self._paths):
            self._refuse_changed_meanwhile()
            with _disk_errors(self._paths.out):
                export(self.journal, self.folder, self._paths)
        if self.journal.state.running:
            self.journal.stop("finished")
        self.folder.ballast.unlink(missing_ok=True)

    def stop(self, reason: str) -> None:
        """Records a stop on purpose and publishes what is finished under the partial name."""
        self.journal.stop(reason)
        with _disk_errors(self._paths.partial):
            export_partial(self.folder.journal, self.journal.state, self._paths.partial)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def _opened(self, plan: Plan) -> dict[str, Any]:
        name = os.fsencode(self.folder.path.resolve()) + f":{self.created}:{os.getpid()}".encode()
        fingerprint = self.preflight.fingerprint
        return {
            "id": blake2b(name, digest_size=4).hexdigest(),
            "created_at": self.created.isoformat(),
            "num_rows": self.preflight.num_rows,
            "input": {"nbytes": fingerprint.nbytes, "sha256": fingerprint.sha256},
            "identity": {**self._identity.facts, **resolved(plan)},
            "endpoints": self.preflight.rows,
            "model_name": self.model_name,
            "request": self._request.as_json(),
        }

    def _go_on(self) -> None:
        """Checks that the job of this folder is the one that was asked for, and takes over what it was begun with."""
        state, go_on = self.journal.state, self._request.go_on
        opened = state.opened
        if str(self._paths.out.resolve()) != opened["request"]["output"]:
            raise JobMismatch(
                f"{self.folder.path} belongs to the output {opened['request']['output']}; choose another output name"
            )
        self._refuse_other_input(self.preflight)
        self._identity.refuse_other(opened, self._request.settings, go_on.drift)
        if state.cancelled is not None and not go_on.cancelled:
            raise JobMismatch(f"job {opened['id']} was cancelled; `moedge jobs resume {opened['id']}` goes on with it")
        if go_on.failed:
            self._retry = state.failed_rows
        self.created = datetime.fromisoformat(opened["created_at"])
        self.model_name = opened["model_name"]

    def _refuse_changed_meanwhile(self) -> None:
        before, now = self.preflight.fingerprint, self.input.stat()
        if (now.st_size, now.st_mtime_ns) != (before.nbytes, before.mtime_ns):
            self._refuse_other_input(self._read_input())

    def _read_input(self) -> Preflight:
        return preflight(self.input, self._request.defaults)

    def _refuse_other_input(self, found: Preflight) -> None:
        """Raises InputChanged where the input is not the one that the job was begun with, naming the row."""
        opened = self.journal.state.opened
        if not found.fingerprint.same_content(Fingerprint(**opened["input"], mtime_ns=0)):
            raise InputChanged(
                f"{self.input} is not the input that job {opened['id']} was begun with: "
                f"{self._where_changed(found.index)}. Put it back as it was, or choose another output name"
            )

    def _where_changed(self, rows: RowIndex) -> str:
        for done in read_answers(self.folder.journal, self.journal.state):
            if done.row >= len(rows):
                return f"it has {len(rows):,} rows, and row {done.row + 1:,} was answered"
            if done.input != rows.digest(done.row):
                return f"line {rows.line_number(done.row)} is not what was answered"
        return "rows that have no answer yet were added, removed or edited"


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportFailed(
            f"{path} could not be written ({error.strerror}); every answer is safe in the journal. Make room or "
            "look after the disk, then start the same command again"
        ) from error
