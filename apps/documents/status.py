"""A job over documents as it is on disk, read without disturbing it: its rounds taken together. Torch-free."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from ...face import Counts, JobFolder, JobPhase, JobStatus, OutputPaths, errors, job_id_folders, openai_batch
from .request import ROUNDS, DocumentPaths, facts_digest
from .rounds import Rounds


@dataclass(frozen=True)
class DocumentsJob:
    """`path` is the folder beside the output; `rounds` are those of its question that have begun, in their order."""

    path: Path
    rounds: tuple[JobStatus, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises BadJournal, OtherVersion, JobNotFound where no row of it has run."""
        folders = (JobFolder(each.outputs.job) for each in _rounds(path))
        rounds = tuple(JobStatus.read(folder) for folder in folders if folder.begun)
        if not rounds:
            raise errors.JobNotFound(f"{path}: no row of it has run yet")
        return cls(path, rounds)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """What the last run left: with its totals where it was not killed."""
        return _json(DocumentPaths(OutputPaths(self.path), "").summary)

    @cached_property
    def question(self) -> Mapping[str, Any]:
        return _json(DocumentPaths(OutputPaths(self.path), "").question)

    @property
    def job_id(self) -> str:
        return self.rounds[0].job_id

    @property
    def output(self) -> Path:
        return Path(self.summary.get("output") or self.path.with_suffix(".jsonl"))

    @property
    def model(self) -> str:
        return self.rounds[0].model

    @property
    def created(self) -> datetime:
        return self.rounds[0].created

    @property
    def num_rows(self) -> int:
        """Of all rounds so far: chunks, and merges."""
        return sum(each.num_rows for each in self.rounds)

    @property
    def counts(self) -> Counts:
        total = Counts()
        for each in self.rounds:
            total = total.plus(each.counts)
        return total

    @property
    def phase(self) -> JobPhase:
        if JobFolder(self.path).locked:
            return JobPhase.RUNNING
        if "totals" not in self.summary:
            return JobPhase.INTERRUPTED
        return JobPhase.FINISHED if self.reason is None else JobPhase.STOPPED

    @property
    def reason(self) -> str | None:
        """Why the last run ended early."""
        return self.summary.get("reason")

    def batch_object(self) -> dict[str, Any]:
        """OpenAI's batch object of all rounds, as `JobStatus` has one of a batch."""
        counts, first = self.counts, self.rounds[0].batch_object()
        own = first["moedge"] | {
            "state": self.phase, "cut": counts.cut, "finish_reasons": dict(counts.finish_reasons),
            "errors": dict(counts.codes), "reason": self.reason, "folder": str(self.path), "rounds": len(self.rounds),
        }  # fmt: skip
        finished, errors = self.phase is JobPhase.FINISHED, OutputPaths(self.output).errors
        shown = first | {
            "input_file_id": self.summary.get("folder"),
            "status": {JobPhase.RUNNING: "in_progress", JobPhase.FINISHED: "completed"}.get(self.phase, "expired"),
            "output_file_id": str(self.output) if finished else None,
            "error_file_id": str(errors) if finished and errors.exists() else None,
            "completed_at": self.rounds[-1].batch_object()["completed_at"] if finished else None,
            "moedge": own,
        }
        return openai_batch(shown, self.num_rows, counts)


def find_rounds(name: str) -> DocumentsJob | None:
    """The job over documents with this output, folder, or beginning of an id; None for any other name.

    Raises BadJournal, OtherVersion, JobNotFound where no row of it has run.
    """
    for path in (Path(name), Path(name).with_suffix(".job") if Path(name).name else Path(name)):
        if (path / ROUNDS).is_dir():
            return DocumentsJob.read(path.resolve())
    found = {whole for folder in job_id_folders(name) if (whole := whole_job(folder)) is not None}
    return DocumentsJob.read(found.pop()) if len(found) == 1 else None


def whole_job(folder: JobFolder) -> Path | None:
    """The folder of the job over documents that a batch job is a round of; None for a job of its own."""
    path = folder.path
    whole = path.parent.parent.parent
    return whole if path.parent.parent.name == ROUNDS and whole.suffix == ".job" else None


class DocumentsFolder(NamedTuple):
    """The folder beside the output of a job over documents, which was not read yet."""

    path: Path

    def read(self) -> DocumentsJob:
        """Raises as `DocumentsJob.read`."""
        return DocumentsJob.read(self.path)


def collect_rounds(folders: Iterable[Any]) -> Iterator[Any]:
    """Batch jobs as they are, and for rounds, once, the folder of the job that they belong to."""
    given: set[Path] = set()
    for folder in folders:
        whole = whole_job(folder) if isinstance(folder, JobFolder) else None
        if whole is None:
            yield folder
        elif whole not in given:
            given.add(whole)
            yield DocumentsFolder(whole)


def _rounds(path: Path) -> Iterable[Any]:
    """The rounds of the question that is asked; of the last one where questions were only tried."""
    facts = _json(DocumentPaths(OutputPaths(path), "").question)
    if facts:
        return Rounds(path / ROUNDS / facts_digest(facts)).all
    folders = sorted((path / ROUNDS).glob("*"), key=lambda each: each.stat().st_mtime)
    return Rounds(folders[-1]).all if folders else ()


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if os.path.isfile(path) else {}
