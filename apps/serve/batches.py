"""Batches of the API: each is a job in the server's folder, and they run on the one engine in the order of arrival.

A batch has a record beside its job. Of a server that was killed the unfinished ones are run again by the next one.
"""

import json
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ... import MoedgeError
from ...face import (
    CANCELLED,
    WINDOW,
    BatchRequest,
    Checked,
    Counts,
    Endpoint,
    JobFolder,
    JobPhase,
    JobStatus,
    LoadedModel,
    Measured,
    OutputPaths,
    RowFailure,
    Running,
    batch_request,
    cancel,
    counted,
    errors,
    export_now,
    is_exhausted,
    openai_batch,
    write_atomically,
)
from .engine_thread import EngineThread
from .errors import ApiError, not_found, refused
from .files import BATCH, FileStore, new_id, read_records, write_new
from .limits import ServerSettings

_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
_ENDPOINTS = tuple(each.value for each in Endpoint if each is not Endpoint.SHORT)
_ENDED = ("completed", "failed", "cancelled")
# After these the next batch would not do better: the server ends, and its batches are resumed by the next one.
_FATAL = (errors.ExportFailed, errors.JournalFailed, errors.MemoryGaveOut, errors.Stalled)


@dataclass(slots=True)
class ServedBatch:
    """OpenAI's batch, and what its record has on disk. Times are seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def ended(self) -> bool:
        return self.status in _ENDED

    def enter(self, status: str) -> None:
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def fail(self, code: str, message: str, lines: Sequence[RowFailure] = (), total: int = 0) -> None:
        """`lines` are the first of `total` lines of the input that are wrong; each gets an entry of its own."""
        found = [{"code": each.code, "message": each.message, "param": each.param, "line": each.line} for each in lines]
        if total > len(lines):
            message = f"{total - len(lines):,} more lines are wrong"
        if total != len(lines) or not lines:
            found.append({"code": code, "message": message, "param": None, "line": None})
        self.errors = found
        self.enter("failed")

    def as_json(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        shown = {name: value for name, value in asdict(self).items() if name not in ("total", *_COUNTS)}
        shown["errors"] = None if self.errors is None else {"object": "list", "data": self.errors}
        return openai_batch(shown, self.total, Counts(**{of: getattr(self, name) for name, of in _COUNTS.items()}))

    def count(self, counts: Counts) -> None:
        for name, of in _COUNTS.items():
            setattr(self, name, getattr(counts, of))


# Fields of a batch, and those of the counts of its job.
_COUNTS = {"completed": "ok", "failed": "failed", "input_tokens": "prompt_tokens", "output_tokens": "generated_tokens",
           "cached_tokens": "cached_tokens", "reasoning_tokens": "reasoning_tokens"}  # fmt: skip


class BatchQueue:
    """The batches of one server. Public methods may be called from any thread."""

    def __init__(self, folder: Path, files: FileStore, engine: EngineThread, settings: ServerSettings) -> None:
        self.died: Callable[[BaseException], None] = lambda error: None
        self._folder = folder / "batches"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._files = files
        self.engine = engine
        self._settings = settings
        self._limits = settings.limits
        self._lock = threading.RLock()
        self._batches: dict[str, ServedBatch] = {}
        self._waiting: queue.SimpleQueue[ServedBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        for batch in sorted(
            read_records(self._folder, "batch_*.json", ServedBatch), key=lambda each: (each.created_at, each.id)
        ):
            self._batches[batch.id] = batch
            if not batch.ended:
                self._waiting.put(batch)

    def start(self) -> None:
        """Batches run from here on, once the engine is ready."""
        self._thread.start()

    def close(self) -> None:
        """Waits for the batch that runs; the engine has been stopped."""
        self._waiting.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def counts(self) -> dict[str, int]:
        """How many batches there are by status."""
        with self._lock:
            statuses = [batch.status for batch in self._batches.values()]
        return {status: statuses.count(status) for status in sorted(set(statuses))}

    def create(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ApiError."""
        endpoint, file_id, window = (body.get(name) for name in ("endpoint", "input_file_id", "completion_window"))
        if endpoint not in _ENDPOINTS:
            raise refused(f"endpoint must be one of {', '.join(_ENDPOINTS)}", "endpoint")
        if window != WINDOW:
            raise refused(f'completion_window must be "{WINDOW}"', "completion_window")
        if not isinstance(file_id, str):
            raise refused("input_file_id must be the id of a file", "input_file_id", "invalid_type")
        if self._files.get(file_id).purpose != BATCH:
            raise refused(f'{file_id} was not uploaded with the purpose "{BATCH}"', "input_file_id")
        batch = ServedBatch(new_id("batch_"), str(endpoint), file_id, int(time.time()), _metadata(body.get("metadata")))
        with self._lock:
            unfinished = sum(not each.ended for each in self._batches.values())
            if unfinished >= self._limits.queued or len(self._batches) >= self._limits.batches:
                raise ApiError(429, f"{unfinished:,} batches are unfinished; wait for some", code="too_many_batches")
            write_new(self._record(batch), asdict(batch))
            self._batches[batch.id] = batch
            self._waiting.put(batch)
            return batch.as_json()

    def get(self, batch_id: str) -> dict[str, Any]:
        """Raises ApiError."""
        with self._lock:
            return self._find(batch_id).as_json()

    def list(self) -> list[dict[str, Any]]:
        """The newest first."""
        with self._lock:
            return [batch.as_json() for batch in reversed(self._batches.values())]

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """A batch that runs ends after its pass. Raises ApiError for one that has ended."""
        with self._lock:
            batch = self._find(batch_id)
            if batch.ended:
                raise ApiError(409, f"{batch_id} is {batch.status} and cannot be cancelled", code="batch_ended")
            if batch.status != "cancelling":
                # On disk first: what is answered is what the next server does.
                wanted = replace(batch)
                wanted.enter("cancelling")
                self._save(wanted)
                batch.enter("cancelling")
            return batch.as_json()

    def uses(self, file_id: str) -> bool:
        """Whether an unfinished batch reads a file."""
        with self._lock:
            return any(batch.input_file_id == file_id and not batch.ended for batch in self._batches.values())

    def _find(self, batch_id: str) -> ServedBatch:
        batch = self._batches.get(batch_id) if _BATCH_ID.fullmatch(batch_id) else None
        if batch is None:
            raise not_found("batch", batch_id)
        return batch

    def enter(self, batch: ServedBatch, status: str) -> None:
        """The batch goes on; one that is being cancelled stays so until it has ended."""
        with self._lock:
            if batch.status != "cancelling":
                batch.enter(status)
                self._save(batch)

    def _save(self, batch: ServedBatch) -> None:
        with self._lock:
            write_atomically(self._record(batch), json.dumps(asdict(batch)).encode())

    def _record(self, batch: ServedBatch) -> Path:
        return self._folder / f"{batch.id}.json"

    def _paths(self, batch: ServedBatch) -> OutputPaths:
        return OutputPaths(self._folder / f"{batch.id}.jsonl")

    def _run(self) -> None:
        loaded = self.engine.ready.result()
        while (batch := self._waiting.get()) is not None:
            try:
                self._end(batch, self._outcome(batch, loaded))
            except BaseException as error:
                if not isinstance(error, ApiError):
                    self.died(error)
                # The record stays as it is: the next server resumes the batch.
                return

    def _outcome(self, batch: ServedBatch, loaded: LoadedModel) -> str | None:
        """What became of a batch: a status of _ENDED, or None where the server stops before its end."""
        folder = JobFolder(self._paths(batch).job)
        if batch.status == "cancelling" and not folder.begun:
            return "cancelled"
        try:
            phase = JobStatus.read(folder).phase if folder.begun else None
            if phase is JobPhase.CANCELLED or (batch.status == "cancelling" and phase is not JobPhase.FINISHED):
                # An earlier server has answered rows of it, or `moedge jobs` has cancelled it.
                cancel(folder)
                export_now(folder, None)
                return "cancelled"
            return _BatchRun(self, batch, self._request(batch)).run(loaded, self.engine)
        except (*_FATAL, ApiError):
            raise
        except MoedgeError as error:
            if (cause := error.__context__) is not None and is_exhausted(cause):
                # Refused for the system's sake, such as a job's folder on a disk that is read-only now.
                raise cause from error
            wrong = (error.failures, error.total) if isinstance(error, errors.InputRefused) else ((), 0)
            self._fail(batch, "invalid_input", str(error), *wrong)
        except Exception as error:
            if self.engine.broken or is_exhausted(error):
                raise
            traceback.print_exc()
            self._fail(batch, "server_error", f"{type(error).__name__}: {error}")
        return None

    def _request(self, batch: ServedBatch) -> BatchRequest:
        settings = self._settings
        options = {name: value for name, value in settings.options.items() if name in _OF_JOBS}
        return batch_request(
            settings.model,
            self._files.path(self._files.get(batch.input_file_id)),
            self._paths(batch).out,
            **{**options, "input_format": "jsonl", "max_tokens": settings.max_tokens, "seed": settings.seed},
        )

    def _fail(
        self, batch: ServedBatch, code: str, message: str, lines: Sequence[RowFailure] = (), total: int = 0
    ) -> None:
        path = str(self._files.path(self._files.get(batch.input_file_id)))
        with self._lock:
            batch.fail(code, message.replace(path, batch.input_file_id), lines, total)
            self._save(batch)

    def _end(self, batch: ServedBatch, outcome: str | None) -> None:
        if outcome is None:
            return
        paths = self._paths(batch)
        answers = paths.out if outcome == "completed" else paths.partial
        output = self._files.publish(answers, batch.id, "output")
        errors = self._files.publish(paths.errors, batch.id, "error") if outcome == "completed" else None
        with self._lock:
            batch.output_file_id, batch.error_file_id = output, errors
            batch.enter(outcome)
            self._save(batch)


_OF_JOBS = ("ram", "gpu_mem", "disk", "disk_dir", "dtype", "quant", "compute", "kv", "attention", "deterministic",
            "tokens_per_pass", "max_sequences", "stream", "host_kv", "cpu_experts",
            "cpu_attention")  # fmt: skip


class _BatchRun:
    """One run of a batch."""

    def __init__(self, owner: BatchQueue, batch: ServedBatch, request: BatchRequest) -> None:
        self._owner = owner
        self._batch = batch
        self._request = request
        self._counted: Counts | None = None

    def run(self, loaded: LoadedModel, engine: EngineThread) -> str | None:
        """Raises what a job raises, and ApiError where the server stops before the first pass."""
        with Checked.open(self._request, loaded) as checked:
            self._batch.total = checked.preflight.num_rows
            self._refuse_other_endpoint(checked.preflight.rows)
            if checked.finished:
                self._batch.count(checked.publish().session.journal.state.counts)
                return "completed"
            planned = Measured.of(checked).plan()
            running, reason = engine.run_job(planned, self._watch)
            if reason is None and running.stopped_because is None:
                self._owner.enter(self._batch, "finalizing")
            running.end(reason)
            self._batch.count(running.session.journal.state.counts)
        if (reason or running.stopped_because) is None:
            return "completed"
        return "cancelled" if running.stopped_because == CANCELLED else None

    def _count_rows(self, running: Running) -> None:
        """Those of this server: what earlier ones answered is there when the batch begins."""
        now = running.session.journal.state.counts.plus(Counts())
        if self._counted is not None:
            self._owner.engine.counts.add_rows(now, self._counted)
        self._counted = now

    def _watch(self, running: Running) -> None:
        """On the engine's thread."""
        self._count_rows(running)
        if self._batch.status == "validating":
            self._owner.enter(self._batch, "in_progress")
        self._batch.count(running.session.journal.state.counts)
        if self._batch.status == "cancelling":
            running.session.folder.cancel.touch()

    def _refuse_other_endpoint(self, rows: Mapping[str, int]) -> None:
        """`rows` are numbers of rows by endpoint; short rows suit all."""
        for endpoint in Endpoint:
            others = endpoint.value in _ENDPOINTS and endpoint.value != self._batch.endpoint
            if others and (count := rows.get(endpoint.name.lower(), 0)):
                raise errors.InputRefused(
                    f"{counted(count, 'line')} of {self._batch.input_file_id} have the url {endpoint.value}, and the "
                    f"batch is for {self._batch.endpoint}; make a batch for each"
                )


def _metadata(value: Any) -> dict[str, str] | None:
    """At most 16 short texts by name, as in OpenAI's API. Raises ApiError."""
    if value is None:
        return None
    fine = isinstance(value, dict) and len(value) <= 16
    if not fine or not all(
        isinstance(text, str) and len(text) <= 512 and len(name) <= 64 for name, text in value.items()
    ):
        raise refused("metadata must be an object of at most 16 strings of up to 512 characters", "metadata")
    return dict(value)
