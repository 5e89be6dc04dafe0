"""From a journal to the files that a person asked for, in the order of the input. What is there is never overwritten.

The same journal gives the same bytes, so an export that was cut off is simply done again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..settings.errors import BadJournal, OutputExists
from .folder import JobFolder, now_text
from .journal.journal import Journal
from .journal.record import HEAD_NBYTES, Done, decode_done
from .journal.state import JobState
from .outputs import NewFile, OutputPaths


@dataclass(frozen=True, slots=True)
class Exported:
    """sha256 (hex) of what was written; `errors` is None where no row failed."""

    out: str | None
    errors: str | None


def read_answers(journal: Path, state: JobState) -> Iterable[Done]:
    """Every answer and error so far, in the order of the input; one is in memory at a time."""
    with journal.open("rb") as file:
        for row, offset in state.answered():
            file.seek(offset)
            done = decode_done(file.readline()[HEAD_NBYTES:-1])
            if done is None or done.row != row:
                raise BadJournal(f"{journal} has no answer to row {row} at byte {offset}; it was changed meanwhile")
            yield done


def export(journal: Journal, folder: JobFolder, paths: OutputPaths) -> Exported:
    """Publishes OUT, and the error file if a row failed. Raises OutputExists where something else has their names."""
    answered = _HashedFile(paths.out, folder.unfinished("out"))
    failed = _HashedFile(paths.errors, folder.unfinished("errors"))
    try:
        for done in read_answers(folder.journal, journal.state):
            (failed if done.failed else answered).write(done.line)
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


def export_partial(journal: Path, state: JobState, target: Path) -> None:
    """Every row that is finished, answered or failed, in one file."""
    file = NewFile(target)
    try:
        for done in read_answers(journal, state):
            file.write(done.line.encode("ascii") + b"\n")
        file.publish()
    finally:
        file.discard()


def is_exported(state: JobState, paths: OutputPaths) -> bool:
    """Whether the job's last words are where they were put, unchanged."""
    if not (state.finished and state.export_is_current):
        return False
    wanted = Exported(**_hashes(state.exported))
    return _sha256(paths.out) == wanted.out and _sha256(paths.errors) == wanted.errors


def _hashes(record: Any) -> dict[str, str | None]:
    return {name: (record or {}).get(name) for name in ("out", "errors")}


def _refuse_foreign(path: Path, own: set[str | None]) -> None:
    # A dangling link counts: renaming over it would destroy it.
    if os.path.lexists(path) and _sha256(path) not in own - {None}:
        raise OutputExists(
            f"{path} exists and is not what this job wrote; move it away, then start the same command again. "
            "No answer is lost"
        )


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    digest = sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


class _HashedFile:
    def __init__(self, path: Path, hidden: Path) -> None:
        self.nbytes = 0
        self._file = NewFile(path, hidden)
        self._digest = sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, line: str) -> None:
        data = line.encode("ascii") + b"\n"
        self.nbytes += len(data)
        self._digest.update(data)
        self._file.write(data)

    def publish(self) -> None:
        self._file.publish()

    def discard(self) -> None:
        self._file.discard()
