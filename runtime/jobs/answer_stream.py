"""The answers of a running job, each copied from its journal once it is on disk, in the order in which rows finish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from .folder import JobFolder
from .journal.journal import Journal
from .journal.state import HEAD_NBYTES, decode_done
from .outputs import OutputPaths, export_partial


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
