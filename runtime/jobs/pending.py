"""The rows that have no answer yet, in the order in which they run: suspects apart, then all others at full speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .codes import ErrorCode
from .journal.state import JobState
from .row_file import RowFile
from .rows import BadRow, Row, RowError


class Pending:
    """`rows` are numbers of rows that can be run, in their order; `bad` are the rows that cannot."""

    def __init__(self, state: JobState, file: RowFile, rows: Sequence[int], bad: Iterable[BadRow] = ()) -> None:
        self._state = state
        self._file = file
        self._rows = rows
        self._bad = bad

    def waves(self) -> Iterator[Iterator[Row | BadRow]]:
        """Each wave is to be finished before the next begins: a process that dies in one was killed by a row of it."""
        yield iter(self._bad)
        # Taken once: rows leave the suspects as they are answered.
        isolated = {row for row, suspicion in self._state.suspects.items() if suspicion.isolated}
        for row in self._rows if isolated else ():
            if row in isolated:
                yield map(self._suspect, [row])
        yield (self._read(row) for row in self._rows if row not in isolated)

    def _suspect(self, row: int) -> Row | BadRow:
        read, suspicion = self._read(row), self._state.suspects[row]
        if not suspicion.condemned:
            return read
        error = RowError(ErrorCode.WORKER_CRASHED, f"{suspicion}; it is not run again", None, read.line)
        return BadRow(row, read.line, read.id, read.short, error)

    def _read(self, row: int) -> Row:
        return self._file.row(row)
