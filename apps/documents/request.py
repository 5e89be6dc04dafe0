"""A job over a folder of documents: what is asked for, and what must stay the same until its last row."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...face import BatchRequest, JobFolder, OutputPaths, errors, write_atomically
from .question import Question
from .reader_process import ReadOptions


@dataclass(frozen=True, slots=True)
class DocumentsRequest:
    """`batch` has the folder of documents as its input, and everything that a batch job has beside its rows.

    `cache` is where texts are kept, in the job's folder by default; `sample` is the number of documents to try.
    `mirror` is the folder for Markdown files, None for none.
    """

    batch: BatchRequest
    question: Question
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    reading: ReadOptions = field(default_factory=ReadOptions)
    cache: Path | None = None
    workers: int | None = None
    sample: int | None = None
    mirror: Path | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What answers depend on beside the model and its settings, by the names of the options."""
        found = {**asdict(self.batch.defaults), **self.question.facts}
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]


ROUNDS = "rounds"


def facts_digest(facts: Mapping[str, Any]) -> str:
    """Names the folder of the rounds that answer these."""
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class DocumentPaths:
    """The files of a job over documents, in the folder beside its output. `digest` is that of `facts_digest`."""

    outputs: OutputPaths
    digest: str

    @property
    def folder(self) -> JobFolder:
        return JobFolder(self.outputs.job)

    @property
    def texts(self) -> Path:
        """What was read, by the hash of the files."""
        return self.outputs.job / "documents"

    @property
    def members(self) -> Path:
        """What lies in archives and mails of the folder."""
        return self.outputs.job / "members"

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
        """Those of one question: whoever tries several keeps the answers to each."""
        return self.outputs.job / ROUNDS / self.digest

    @property
    def question(self) -> Path:
        return self.outputs.job / "question.json"

    @property
    def mirrored(self) -> Path:
        """The names of the files that --mirror wrote."""
        return self.outputs.job / "mirrored.json"

    @property
    def summary(self) -> Path:
        """What the last run came to, for reports and lists of jobs."""
        return self.outputs.job / "summary.json"

    @property
    def published(self) -> Path:
        """The hashes of the output files."""
        return self.outputs.job / "published.json"


def settle_question(paths: DocumentPaths, request: DocumentsRequest) -> None:
    """Notes the question of a job that is not only tried. Raises JobMismatch, OutputExists.

    A question that has no answer yet, or was only tried, may be replaced by another.
    """
    if paths.folder.begun:
        raise errors.JobMismatch(f"{paths.outputs.job} belongs to a job of `moedge batch`; choose another output name")
    if not paths.published.exists():
        paths.outputs.refuse_existing()
    if request.sample is not None:
        return
    recorded: dict[str, Any] = json.loads(paths.question.read_bytes()) if paths.question.exists() else {}
    facts = request.facts
    different = [name for name in facts if recorded.get(name) != facts[name]]
    if recorded and different and _answered(paths, recorded):
        raise errors.JobMismatch(
            f"{paths.outputs.out} was made with another question: {', '.join(different)} differ. Use the old one, or "
            f"another -o with --cache {paths.texts}, which reads no file again, or start over: "
            f"rm -r {paths.outputs.job} {paths.outputs.out}"
        )
    if different:
        write_atomically(paths.question, json.dumps(facts, indent=1).encode())


def _answered(paths: DocumentPaths, recorded: Mapping[str, Any]) -> bool:
    """Whether a row of the question that was recorded has begun."""
    folder = paths.outputs.job / ROUNDS / facts_digest(recorded)
    return any(folder.glob("*.job/journal"))


def refuse_foreign(paths: DocumentPaths, hashes: dict[str, str | None]) -> None:
    """Raises OutputExists for an output that this job did not write; `hashes` are of what is there now."""
    known = json.loads(paths.published.read_bytes()) if paths.published.exists() else {}
    for name, path in (("out", paths.outputs.out), ("errors", paths.outputs.errors)):
        if hashes[name] is not None and hashes[name] not in known.get(name, []):
            raise errors.OutputExists(
                f"{path} exists and is not what this job wrote; move it away, then start the same command again. "
                "No answer is lost"
            )
