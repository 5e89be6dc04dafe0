"""A job over a folder of documents: what is asked for, and what must stay the same until its last row."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...offload.atomic_file import write_atomically
from ..jobs.folder import JobFolder
from ..jobs.outputs import OutputPaths
from ..jobs.request import BatchRequest
from ..settings.errors import JobMismatch, OutputExists
from .question import Question
from .reader_process import ReadOptions


@dataclass(frozen=True, slots=True)
class DocumentsRequest:
    """`batch` has the folder of documents as its input, and everything that a batch job has beside its rows.

    `cache` is where texts are kept, in the job's folder by default; `sample` is the number of documents to try.
    """

    batch: BatchRequest
    question: Question
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    reading: ReadOptions = field(default_factory=ReadOptions)
    cache: Path | None = None
    workers: int | None = None
    sample: int | None = None


@dataclass(frozen=True, slots=True)
class DocumentPaths:
    """The files of a job over documents, in the folder beside its output."""

    outputs: OutputPaths

    @property
    def folder(self) -> JobFolder:
        return JobFolder(self.outputs.job)

    @property
    def texts(self) -> Path:
        """What was read, by the hash of the files."""
        return self.outputs.job / "documents"

    @property
    def index(self) -> Path:
        """The documents of the folder when it was read last."""
        return self.outputs.job / "documents.jsonl"

    @property
    def sample(self) -> Path:
        """The documents that were tried."""
        return self.outputs.job / "sample.jsonl"

    @property
    def rounds(self) -> Path:
        return self.outputs.job / "rounds"

    @property
    def question(self) -> Path:
        return self.outputs.job / "question.json"

    @property
    def published(self) -> Path:
        """The hashes of the output files."""
        return self.outputs.job / "published.json"


def settle_question(paths: DocumentPaths, question: Question, accepted: Collection[str]) -> None:
    """Notes the question of a new job. Raises JobMismatch where the output belongs to another question or job."""
    facts = {**question.facts, "long": str(question.long)}
    if not paths.question.exists():
        if paths.folder.begun:
            raise JobMismatch(f"{paths.outputs.job} belongs to a job of `moedge batch`; choose another output name")
        paths.outputs.refuse_existing()
        write_atomically(paths.question, json.dumps(facts, indent=1).encode())
        return
    recorded: dict[str, Any] = json.loads(paths.question.read_bytes())
    different = [name for name in facts if name not in accepted and recorded.get(name) != facts[name]]
    if different:
        raise JobMismatch(
            f"{paths.outputs.out} was made with another question: {', '.join(different)} differ. Use the old one, or "
            f"another -o with --cache {paths.texts}, which reads no file again. To continue anyway, for new documents: "
            + " ".join(f"--accept-drift {name}" for name in different)
        )


def refuse_foreign(paths: DocumentPaths, hashes: dict[str, str | None]) -> None:
    """Raises OutputExists for an output that this job did not write; `hashes` are of what is there now."""
    known = json.loads(paths.published.read_bytes()) if paths.published.exists() else {}
    for name, path in (("out", paths.outputs.out), ("errors", paths.outputs.errors)):
        if hashes[name] is not None and hashes[name] not in known.get(name, []):
            raise OutputExists(
                f"{path} exists and is not what this job wrote; move it away, then start the same command again. "
                "No answer is lost"
            )
