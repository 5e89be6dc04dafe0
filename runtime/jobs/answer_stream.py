"""Answers on standard output: each finished row once it is on disk, in the order in which rows finish.

The job is the same as with a file for its answers, in a folder of its own: the same command resumes it, and writes the
rows that were finished before once more, since whoever read them is gone.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from platformdirs import user_state_path

from ..rows.reader import STDIN
from ..settings.errors import OutputRefused
from .folder import JobFolder
from .journal.journal import Journal
from .journal.state import HEAD_NBYTES, decode_done
from .outputs import OutputPaths, export_partial
from .request import BatchRequest

STDOUT = "-"
_NAME = "answers.jsonl"


def into_folder(request: BatchRequest, folder: Path | None) -> BatchRequest:
    """The request with a file in `folder`, or in one of the user's state that belongs to this very request.

    Raises OutputRefused where the folder cannot be made.
    """
    chosen = folder or user_state_path("moedge") / "streams" / _name(request)
    try:
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OutputRefused(f"job-dir {chosen} cannot be created: {error.strerror}; choose another") from None
    return replace(request, output=chosen / _NAME, follow=False)


def _name(request: BatchRequest) -> str:
    """Rows from a pipe are known to one process only."""
    known = json.dumps(replace(request, output=Path(STDOUT)).as_json(), sort_keys=True)
    alone = f":{os.getpid()}" if os.fspath(request.input) == STDIN else ""
    return blake2b(f"{known}{alone}".encode(), digest_size=8).hexdigest()


def is_kept(output: Path) -> bool:
    """Whether the job is there after its end: not where only standard output has its answers."""
    return not output.parent.is_relative_to(user_state_path("moedge") / "streams")


def remove_finished(request: BatchRequest) -> None:
    """The folder of a job whose answers were all read; not one that the user named."""
    if not is_kept(request.output):
        shutil.rmtree(request.output.parent, ignore_errors=True)


def partial_file(journal: Journal, folder: JobFolder, paths: OutputPaths) -> AnswerStream:
    """The partial file of a running job, for answers as soon as they are on disk.

    It begins with every answer so far, in input order. A row that is continued has a second line, which counts.
    """
    journal.sync()
    export_partial(folder.journal, journal.state, paths.partial)
    return AnswerStream(paths.partial.open("ab"), journal.committed.end)


class AnswerStream:
    """Copies answers from a journal to `out`, from byte `begin` on."""

    def __init__(self, out: BinaryIO, begin: int = 0) -> None:
        self._out = out
        self._end = begin
        self.closed = False

    def upto(self, journal: Path, end: int | None = None) -> None:
        """Writes what was answered up to byte `end`, or all; `closed` says whether nobody reads any more."""
        if self.closed or (end is not None and end <= self._end):
            return
        with journal.open("rb") as file:
            file.seek(self._end)
            try:
                while (end is None or self._end < end) and (line := file.readline()).endswith(b"\n"):
                    self._end += len(line)
                    if (done := decode_done(line[HEAD_NBYTES:-1])) is not None:
                        self._out.write(done.line.encode("ascii") + b"\n")
                self._out.flush()
            except BrokenPipeError:
                self.closed = True
                # Or the interpreter would fail at its end, when it flushes.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())

    def close(self) -> None:
        self._out.close()
