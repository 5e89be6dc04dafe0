"""The state of a job, read from its folder without disturbing whoever works on it, and what can be done to it from
outside. Torch-free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self

from platformdirs import user_state_path

from ..settings.applications import hooks
from ..settings.errors import JobInUse, JobMismatch, JobNotFound, OutputExists, counted
from .folder import JobFolder, JobLock, now_text
from .journal.journal import Journal, Repaired, read_answer, read_answers, repair
from .journal.state import FINISHED, Counts, Done, JobState, read_state
from .outputs import OutputPaths, check_folder, export_partial, keep_example, records


class JobPhase(StrEnum):
    """`interrupted`: the process was killed or crashed, or the power went, before it recorded a stop."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"


# The layout of what `moedge jobs` prints as JSON.
SCHEMA = "moedge.batch/1"
# The time that OpenAI gives a batch; ours take as long as they take.
WINDOW = "24h"
_BATCH_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "cancelling_at", "cancelled_at",
                "expires_at", "expired_at")  # fmt: skip
# In the words of OpenAI's batch object. `expired` is the one for a batch that ended early and keeps what is finished.
_BATCH_STATUS = {
    JobPhase.RUNNING: "in_progress",
    JobPhase.CANCELLING: "cancelling",
    JobPhase.FINISHED: "completed",
    JobPhase.CANCELLED: "cancelled",
    JobPhase.STOPPED: "expired",
    JobPhase.INTERRUPTED: "expired",
}
# A short row with a prompt is a completion; OpenAI has no word of its own for it.
_ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "response": "/v1/responses",
    "short": "/v1/completions",
}


@dataclass(frozen=True, slots=True)
class JobStatus:
    folder: JobFolder
    state: JobState
    phase: JobPhase

    @classmethod
    def read(cls, folder: JobFolder) -> Self:
        """Raises BadJournal, OtherVersion."""
        # The lock first: a job that finishes in between is then read as finished.
        locked = folder.locked
        state = read_state(folder.journal)
        return cls(folder, state, _phase(folder, state, locked))

    @property
    def job_id(self) -> str:
        return str(self.state.opened["id"])

    def failures(self, most: int) -> Iterator[tuple[str, int, list[Done]]]:
        """(code, how many rows failed with it, the first `most` of them)."""
        for code, rows in self.state.failures().items():
            yield code, len(rows), [read_answer(self.folder.journal, row, at) for row, at in rows[:most]]

    def examples(self) -> dict[str, str]:
        """The beginnings of some answers by the ids of their rows: the shortest, and others at random."""
        found: dict[str, str] = {}
        for done in read_answers(self.folder.journal, self.state):
            for each in records(done.line, None):
                if (text := each.get("text")) is not None:
                    keep_example(found, each["id"], text)
        return found

    @property
    def output(self) -> Path:
        return Path(self.state.opened["request"]["output"])

    @property
    def model(self) -> str:
        """The name that the job was started with."""
        return str(self.state.opened["model_name"])

    @property
    def counts(self) -> Counts:
        return self.state.counts

    @property
    def num_rows(self) -> int:
        return self.state.num_rows

    @property
    def created(self) -> datetime:
        return datetime.fromisoformat(self.state.opened["created_at"])

    @property
    def reason(self) -> str | None:
        """Why the last process stopped before the end."""
        if self.state.stopped is None or self.state.stopped["reason"] == FINISHED:
            return None
        return str(self.state.stopped["reason"])

    def batch_object(self) -> dict[str, Any]:
        """OpenAI's batch object; what it has no word for is under `moedge`."""
        opened, counts, finished = self.state.opened, self.state.counts, self.phase is JobPhase.FINISHED
        endpoints = sorted(opened["endpoints"].items(), key=lambda each: -each[1]) or [("short", 0)]
        shown = {
            "id": self.job_id,
            "endpoint": _ENDPOINTS[endpoints[0][0]],
            "input_file_id": opened["request"]["input"],
            "status": _BATCH_STATUS[self.phase],
            "output_file_id": str(self.output) if finished else None,
            "error_file_id": str(self.output.with_suffix(".errors.jsonl")) if finished and counts.failed else None,
            "created_at": _seconds(opened["created_at"]),
            "in_progress_at": _at(self.state.started),
            "completed_at": _at(self.state.exported) if finished else None,
            "cancelled_at": _at(self.state.cancelled),
            "moedge": {
                "schema": SCHEMA,
                "state": self.phase,
                "model": self.model,
                "endpoints": opened["endpoints"],
                "cut": counts.cut,
                "finish_reasons": dict(counts.finish_reasons),
                "errors": dict(counts.codes),
                "reason": self.reason,
                "folder": str(self.folder.path),
                "identity": opened["identity"],
                "suspects": sorted(row for row, each in self.state.suspects.items() if each.isolated),
            },
        }
        return openai_batch(shown, self.state.num_rows, counts)


def openai_batch(shown: Mapping[str, Any], num_rows: int, counts: Counts) -> dict[str, Any]:
    """OpenAI's batch object of some rows; `shown` are its keys that are not counts, and more."""
    return {
        **dict.fromkeys(_BATCH_TIMES),
        "object": "batch",
        "completion_window": WINDOW,
        "errors": None,
        "metadata": None,
        **shown,
        "request_counts": {"total": num_rows, "completed": counts.ok, "failed": counts.failed},
        "usage": {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.generated_tokens,
        },
    }


def _phase(folder: JobFolder, state: JobState, locked: bool) -> JobPhase:
    if locked:
        return JobPhase.CANCELLING if folder.cancel.exists() else JobPhase.RUNNING
    if state.finished and state.export_is_current:
        return JobPhase.FINISHED
    if state.cancelled is not None:
        return JobPhase.CANCELLED
    return JobPhase.INTERRUPTED if state.running else JobPhase.STOPPED


def _at(record: Mapping[str, Any] | None) -> int | None:
    return None if record is None else _seconds(record["at"])


def _seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


_SUFFIX = ".job"


def register(job_id: str, folder: JobFolder) -> None:
    """Leaves nothing where the state folder cannot be written: the job itself is beside its output."""
    with suppress(OSError):
        root = _root()
        root.mkdir(parents=True, exist_ok=True)
        link = root / job_id
        link.unlink(missing_ok=True)
        link.symlink_to(folder.path.resolve())


def jobs(here: Path | None = None) -> Iterator[JobFolder]:
    """Jobs that this user started, and jobs in the folder `here`; removes links to deleted jobs."""
    found: dict[Path, JobFolder] = {}
    for link in sorted(_root().glob("*")):
        folder = JobFolder(Path(os.path.realpath(link)))
        if folder.begun:
            found[folder.path] = folder
        else:
            link.unlink(missing_ok=True)
    for path in sorted((here or Path.cwd()).glob(f"*{_SUFFIX}")):
        folder = JobFolder(path.resolve())
        if folder.begun:
            found[folder.path] = folder
    yield from found.values()


class ListedJob(Protocol):
    """A batch job, or a job of rounds."""

    @property
    def job_id(self) -> str: ...
    @property
    def phase(self) -> JobPhase: ...
    @property
    def counts(self) -> Counts: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def created(self) -> datetime: ...
    @property
    def model(self) -> str: ...
    @property
    def output(self) -> Path: ...


class RoundsJob(ListedJob, Protocol):
    """A job that an application runs as several batch jobs, its rounds; `path` is its folder.

    `summary` is what the last run left, `question` what is the same for all rows.
    """

    @property
    def path(self) -> Path: ...
    @property
    def rounds(self) -> tuple[JobStatus, ...]: ...
    @property
    def summary(self) -> Mapping[str, Any]: ...
    @property
    def question(self) -> Mapping[str, Any]: ...
    @property
    def reason(self) -> str | None: ...
    def batch_object(self) -> dict[str, Any]: ...


class RoundsFolder(Protocol):
    """The folder of such a job, which was not read yet."""

    @property
    def path(self) -> Path: ...
    def read(self) -> RoundsJob: ...


def find_rounds(name: str) -> RoundsJob | None:
    """The job of rounds with this output, folder, or beginning of an id; None for any other name.

    Raises BadJournal, OtherVersion, JobNotFound where no row of it has run.
    """
    found = (find(name) for find in hooks("find_rounds"))
    return next((each for each in found if each is not None), None)


def listed_jobs() -> Iterator[JobFolder | RoundsFolder]:
    """The jobs of `jobs`; for rounds, once, the folder of the job that they belong to."""
    found: Iterable[JobFolder | RoundsFolder] = jobs()
    for collect in hooks("collect_rounds"):
        found = collect(found)
    yield from found


def find_job(name: str) -> JobFolder:
    """Finds a job by its id or a prefix of it, its folder, or its output. Raises JobNotFound."""
    for path in (Path(name), Path(name).with_suffix(_SUFFIX) if Path(name).name else Path(name)):
        if JobFolder(path).begun:
            return JobFolder(path.resolve())
    matching = job_id_folders(name)
    if len(matching) == 1:
        return matching[0]
    found = "several jobs have an id that begins with it" if matching else "no job with that id, folder or output"
    raise JobNotFound(f"{name}: {found}; `moedge jobs ls` lists them")


def job_id_folders(name: str) -> list[JobFolder]:
    """The jobs of this user whose id begins with `name`."""
    # Nothing of it is a pattern; of a name without letters and digits there is no job.
    begin = "".join(character for character in name if character.isalnum()) or "?" * 99
    found = {Path(os.path.realpath(link)) for link in _root().glob(f"{begin}*")}
    return [folder for folder in map(JobFolder, sorted(found)) if folder.begun]


def _root() -> Path:
    return user_state_path("moedge") / "jobs"


def cancel(folder: JobFolder) -> str:
    """Returns what became of it, in words."""
    try:
        lock = JobLock(folder)
    except JobInUse:
        folder.cancel.touch()
        return "stopping after the current pass"
    with closing(lock), Journal(folder.journal) as journal:
        if journal.state.finished:
            return "already finished; nothing was cancelled"
        journal.cancel(now_text())
    return f"cancelled; resume it with `moedge jobs resume {journal.state.opened['id']}`"


def export_now(folder: JobFolder, target: Path | None) -> str:
    """Returns what was written, in words. A finished job has its output already: without `target`, nothing is written.

    Raises OutputExists for a file of the user's choice that is there, OutputRefused for one that cannot be written.
    """
    status = JobStatus.read(folder)
    if target is None and status.phase is JobPhase.FINISHED:
        return f"the job is finished: its answers are in {status.output}"
    if target is not None:
        check_folder(target.parent)
    if target is not None and os.path.lexists(target):
        raise OutputExists(f"{target} exists and is not overwritten; move it away or choose another output name")
    target = target or OutputPaths(status.output).partial
    export_partial(folder.journal, status.state, target)
    return f"{counted(status.state.counts.rows, 'finished row')} written to {target}"


def remove(folder: JobFolder, force: bool = False) -> str:
    """Removes the folder of a job and keeps its outputs; returns what was done, in words.

    Raises JobInUse, and without `force` BadJournal, OtherVersion, and JobMismatch where answers would be lost.
    """
    with closing(JobLock(folder)):
        if not force:
            _refuse_loss(read_state(folder.journal))
        shutil.rmtree(folder.path)
    for link in _root().glob("*"):
        if not link.exists():
            link.unlink(missing_ok=True)
    return f"removed {folder.path}; the output files stay"


def _refuse_loss(state: JobState) -> None:
    """Raises JobMismatch where a journal has answers that no output has."""
    job_id, output = state.opened["id"], state.opened["request"]["output"]
    finished = state.finished and state.export_is_current
    if state.counts.rows and not (finished and Path(output).exists()):
        why = f"has no {output} any more" if finished else "is not finished"
        raise JobMismatch(
            f"job {job_id} {why}, and {counted(state.counts.rows, 'answer')} would be lost; "
            f"export them with `moedge jobs export {job_id} -o FILE`, or give --force"
        )


def repair_journal(folder: JobFolder) -> Repaired:
    """Raises JobInUse, BadJournal, OtherVersion."""
    with closing(JobLock(folder)):
        return repair(folder.journal)
