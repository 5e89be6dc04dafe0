"""Answers read back from a journal: all of them, and those of rows that max_tokens cut, to be continued. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from ...rows.row import Row
from ...settings.errors import BadJournal
from .record import HEAD_NBYTES, CutChoice, Done, decode_done
from .state import JobState


def read_answers(journal: Path, state: JobState) -> Iterable[Done]:
    """Every answer and error so far, in the order of the input; one is in memory at a time."""
    with journal.open("rb") as file:
        for row, offset in state.answered():
            yield _read_answer(file, row, offset)


def read_answer(journal: Path, row: int, offset: int) -> Done:
    """One answer, whose record begins at `offset`. Raises BadJournal."""
    with journal.open("rb") as file:
        return _read_answer(file, row, offset)


def _read_answer(file: BinaryIO, row: int, offset: int) -> Done:
    file.seek(offset)
    done = decode_done(file.readline()[HEAD_NBYTES:-1])
    if done is None or done.row != row:
        raise BadJournal(f"{file.name} has no answer to row {row} at byte {offset}; the journal was changed")
    return done


class CutRows:
    """The cut rows of a job that are continued to `max_tokens`, in all their choices that were cut."""

    def __init__(self, journal: Path | None = None, state: JobState | None = None, max_tokens: int = 0) -> None:
        """Without arguments, no row is continued. The choices are read from the journal when a row starts."""
        self._journal = journal
        self._state = state
        self._max_tokens = max_tokens
        self.rows: Sequence[int] = () if state is None else state.cut_rows(max_tokens)
        self._members = frozenset(self.rows)

    def longer(self, row: Row) -> Row:
        """The row with its new `max_tokens`, if it is continued."""
        if row.index not in self._members:
            return row
        return replace(row, params=replace(row.params, max_tokens=self._max_tokens))

    def choices(self, row: int) -> Sequence[CutChoice]:
        """What the choices of a row have generated so far; empty for a row that is not continued."""
        if self._journal is None or self._state is None or row not in self._members:
            return ()
        offset = self._state.cut_offset(row)
        return () if offset is None else read_answer(self._journal, row, offset).choices
