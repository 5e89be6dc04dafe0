"""Checks the output paths of a job before it starts, and writes its files from the journal in input order.

What is there is never overwritten. The same journal gives the same bytes, so an export that was cut off is simply done
again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from ...offload.atomic_file import AtomicFile, own_name
from ..settings.errors import OutputExists, OutputRefused
from .folder import JobFolder, now_text
from .journal.journal import Journal, read_answers
from .journal.state import JobState
from .table_files import Sink, is_table, refuse_suffix, schema_fields, write_table


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """`out` holds answered rows, `errors` the others; `partial` holds both when a job stops early."""

    out: Path

    @property
    def errors(self) -> Path:
        return self.out.with_suffix(".errors.jsonl")

    @property
    def partial(self) -> Path:
        return self.out.with_suffix(".partial.jsonl")

    @property
    def job(self) -> Path:
        """The job's folder: one for all outputs whose other names would be the same."""
        return self.out.with_suffix(".job")

    def refuse_existing(self) -> None:
        for path in (self.out, self.errors):
            # A dangling link counts: renaming over it would destroy it.
            if os.path.lexists(path):
                raise OutputExists(f"{path} exists and is not overwritten; move it away or choose another output name")


def claim_output(
    out: str | os.PathLike[str],
    input_path: str | os.PathLike[str],
    model_path: str | os.PathLike[str] | None = None,
) -> OutputPaths:
    """Raises `OutputRefused`, `OutputExists` if a file exists that no job wrote. Writes nothing."""
    try:
        return _claim(OutputPaths(Path(out)), input_path, model_path)
    except (OSError, ValueError) as error:
        raise OutputRefused(f"{out} cannot be an output ({error}); choose another name") from None


def _claim(
    paths: OutputPaths, input_path: str | os.PathLike[str], model_path: str | os.PathLike[str] | None
) -> OutputPaths:
    out = paths.out
    if paths.out.is_dir():
        raise OutputRefused(f"{out} is a folder; give a file name in it, such as {paths.out / 'out.jsonl'}")
    if paths.out.suffix == ".gz":
        raise OutputRefused(f"{out}: output is not compressed; drop .gz")
    refuse_suffix(out)
    if out.suffix == ".job":
        raise OutputRefused(f"{out}: .job names the folder of a job; choose another output name")
    check_folder(out.parent, model_path)
    _check_names(paths)
    for path in (paths.out, paths.errors, paths.partial):
        if path.exists() and Path(input_path).exists() and path.samefile(input_path):
            raise OutputRefused(f"{path} is the input, which would be overwritten; choose another output name")
    if not (paths.job / "journal").is_file():
        paths.refuse_existing()
    return paths


def _check_names(paths: OutputPaths) -> None:
    """Checks all names now: a name that is too long must not fail at the end of the job."""
    if "\0" in paths.out.name:
        raise OutputRefused(f"{paths.out.name!a} cannot be an output: it contains a NUL; choose another name")
    limit = os.pathconf(paths.out.parent, "PC_NAME_MAX")
    for path in (paths.out, paths.errors, paths.partial):
        if len(os.fsencode(path.name)) > limit:
            raise OutputRefused(f"{path.name} has more than {limit} bytes; choose a shorter output name")


def check_folder(folder: Path, model_path: str | os.PathLike[str] | None = None) -> None:
    """Raises OutputRefused where no output can be written."""
    if not folder.is_dir():
        raise OutputRefused(f"the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputRefused(f"the folder {folder} is not writable; choose another output name")
    if model_path is not None and folder.resolve().is_relative_to(Path(model_path).resolve()):
        raise OutputRefused(f"the folder {folder} belongs to the model; write the output elsewhere")


@dataclass(frozen=True, slots=True)
class Exported:
    """sha256 (hex) of what was written; `errors` is None where no row failed."""

    out: str | None
    errors: str | None


def export(journal: Journal, folder: JobFolder, paths: OutputPaths) -> Exported:
    """Publishes OUT, and the error file if a row failed. Raises OutputExists where something else has their names."""
    answered = _HashedFile(paths.out, folder.unfinished("out"))
    failed = _HashedFile(paths.errors, folder.unfinished("errors"))
    try:
        table = is_table(paths.out)
        for done in read_answers(folder.journal, journal.state):
            if done.failed:
                failed.write_line(done.line)
            elif not table:
                answered.write_line(done.line)
        if table:
            _write_table(paths.out, folder.journal, journal.state, answered)
        exported = Exported(answered.sha256, failed.sha256 if failed.nbytes else None)
        before = Exported(**_hashes(journal.state.exported))
        _refuse_foreign(paths.out, {exported.out, before.out})
        _refuse_foreign(paths.errors, {exported.errors, before.errors})
        if exported.errors is not None:
            failed.publish()
        else:
            paths.errors.unlink(missing_ok=True)
        # OUT last: whoever sees it can rely on the errors being there too.
        answered.publish()
        paths.partial.unlink(missing_ok=True)
    finally:
        answered.discard()
        failed.discard()
    journal.exported(**asdict(exported), at=now_text())
    return exported


def _write_table(out: Path, journal: Path, state: JobState, file: Sink) -> None:
    request = state.opened["request"]
    fields, formulas = schema_fields(request["defaults"].get("schema")), not request.get("csv_safe", False)

    def lines() -> Iterator[str]:
        return (done.line for done in read_answers(journal, state))

    write_table(out.suffix, lines, fields, file, formulas=formulas)


def export_partial(journal: Path, state: JobState, target: Path) -> None:
    """Every row that is finished, answered or failed, in one file, which is a table where its name says so."""
    file = AtomicFile(target, own_name(target))
    try:
        if is_table(target):
            _write_table(target, journal, state, file)
        else:
            for done in read_answers(journal, state):
                file.write(done.line.encode("ascii") + b"\n")
        file.publish()
    finally:
        file.discard()


def is_exported(state: JobState, paths: OutputPaths) -> bool:
    """Whether the output files are unchanged since the job wrote them."""
    if not (state.finished and state.export_is_current):
        return False
    wanted = Exported(**_hashes(state.exported))
    return file_sha256(paths.out) == wanted.out and file_sha256(paths.errors) == wanted.errors


def refuse_foreign_outputs(state: JobState, paths: OutputPaths) -> None:
    """Raises OutputExists for an output that is not what the job wrote last."""
    before = Exported(**_hashes(state.exported))
    _refuse_foreign(paths.out, {before.out})
    _refuse_foreign(paths.errors, {before.errors})


def _hashes(record: Any) -> dict[str, str | None]:
    return {name: (record or {}).get(name) for name in ("out", "errors")}


def _refuse_foreign(path: Path, own: set[str | None]) -> None:
    # A dangling link counts: renaming over it would destroy it.
    if os.path.lexists(path) and file_sha256(path) not in own - {None}:
        raise OutputExists(
            f"{path} exists and is not what this job wrote; move it away, then start the same command again. "
            "No answer is lost"
        )


def file_sha256(path: Path) -> str | None:
    """Of a file's bytes, in hex; None where there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file_digest(file, sha256).hexdigest()


class _HashedFile:
    def __init__(self, path: Path, hidden: Path) -> None:
        self.nbytes = 0
        self._file = AtomicFile(path, hidden)
        self._digest = sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write_line(self, line: str) -> None:
        self.write(line.encode("ascii") + b"\n")

    def write(self, data: bytes) -> None:
        self.nbytes += len(data)
        self._digest.update(data)
        self._file.write(data)

    def publish(self) -> None:
        self._file.publish()

    def discard(self) -> None:
        self._file.discard()
