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
    def cut(self) -> bool:
        """Whether answers that were cut are continued, to the max_tokens of this request."""
        return self.batch.resume.cut_to is not None

    @property
    def facts(self) -> dict[str, Any]:
        """What answers depend on beside the model and its settings, by the names of the options."""
        found = {**asdict(self.batch.defaults), **self.question.facts}
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]


ROUNDS = "rounds"


# In the file of the question: the max_tokens of today, where answers that were cut have been continued.
_CONTINUED = "continued_to"


def facts_digest(facts: Mapping[str, Any]) -> str:
    """Names the folder of the rounds that answer these, wherever cut answers have been continued to."""
    facts = {name: value for name, value in facts.items() if name != _CONTINUED}
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class DocumentPaths:
    """The files of a job over documents, in the folder beside its output. `digest` is that of `facts_digest`."""

    def __init__(self, outputs: OutputPaths, digest: str) -> None:
        self.outputs = outputs
        self.folder = JobFolder(outputs.job)
        # What was read, by the hash of the files, and what lies in archives and mails of the folder.
        self.texts = outputs.job / "documents"
        self.members = outputs.job / "members"
        # The documents of the folder when it was read last, and those that were tried.
        self.index = outputs.job / "documents.jsonl"
        self.sample = outputs.job / "sample.jsonl"
        # Those of one question: whoever tries several keeps the answers to each.
        self.rounds = outputs.job / ROUNDS / digest
        self.question = outputs.job / "question.json"
        # The names of the files that --mirror wrote.
        self.mirrored = outputs.job / "mirrored.json"
        # What the last run came to, for reports and lists of jobs.
        self.summary = outputs.job / "summary.json"
        # The hashes of the output files.
        self.published = outputs.job / "published.json"


def settle_question(outputs: OutputPaths, request: DocumentsRequest) -> DocumentPaths:
    """The files of a job, in whose folder its question is noted unless it is only tried. Raises JobMismatch,
    OutputExists.

    A question that has no answer yet, or was only tried, may be replaced by another. One whose cut answers are
    continued keeps its folder, and any max_tokens from the first one on.
    """
    paths, facts = DocumentPaths(outputs, facts_digest(request.facts)), request.facts
    if paths.folder.begun:
        raise errors.JobMismatch(f"{outputs.job} belongs to a job of `moedge batch`; choose another output name")
    if not paths.published.exists():
        outputs.refuse_existing()
    begun: dict[str, Any] = json.loads(paths.question.read_bytes()) if paths.question.exists() else {}
    now = {**begun, "max_tokens": begun.pop(_CONTINUED, begun.get("max_tokens"))}
    different = [name for name in facts if now.get(name) != facts[name]]
    longer = different == ["max_tokens"] and facts["max_tokens"] >= begun.get("max_tokens", facts["max_tokens"] + 1)
    same = not different or (longer and request.cut)
    if same:
        paths = DocumentPaths(outputs, facts_digest(begun))
    if request.sample is not None:
        return paths
    if begun and not same and _answered(paths, begun):
        changes = [
            name if isinstance(facts[name], str) else f"{name} {now.get(name)} -> {facts[name]}" for name in different
        ]
        more = longer and facts["max_tokens"] > now["max_tokens"]
        continued = " To continue the answers that were cut, add --cut" if more else ""
        raise errors.JobMismatch(
            f"{outputs.out} was made with another question: {', '.join(changes)} differ. Use the old one, or "
            f"another -o with --cache {paths.texts}, which reads no file again, or start over: "
            f"rm -r {outputs.job} {outputs.out}.{continued}"
        )
    if different:
        noted = {**begun, _CONTINUED: facts["max_tokens"]} if same else facts
        write_atomically(paths.question, json.dumps(noted, indent=1).encode())
    return paths


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
