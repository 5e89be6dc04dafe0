"""In which order rows run fastest: shared prefixes together, long before short. 40 bytes a row.

Rows that begin alike run side by side, so that their common blocks are computed once while they are in the cache. Long
rows first, because the end of a job waits for its longest row: the shorter the last ones, the fewer places stay empty.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..rows.failure import ErrorCode, RowFailure
from ..rows.reader import RowFile
from ..rows.row import Row
from .journal.state import JobState

# Prefix lengths, in tokens, at which rows are compared: from a common instruction to a common document.
LEVELS = (32, 256, 2048)
_MAX = (1 << 64) - 1


class SpeedOrder:
    """Collects rows one by one, then gives their order. Rows are numbers; nothing else of them is kept."""

    def __init__(self) -> None:
        self._rows = array("Q")
        self._lengths = array("Q")
        self._prefixes = tuple(array("Q") for _ in LEVELS)

    def add(self, row: int, prompt_ids: Sequence[int], num_tokens: int) -> None:
        """`num_tokens` is the most that the row may come to, prompt included."""
        self._rows.append(row)
        self._lengths.append(num_tokens)
        for level, hashes in zip(LEVELS, self._prefixes, strict=True):
            hashes.append(_hash(prompt_ids[:level]) if len(prompt_ids) >= level else 0)

    def rows(self, only: Iterable[int] | None = None) -> Iterable[int]:
        """Every row added, or those of them that are in `only`."""
        rows, lengths = np.asarray(self._rows), np.asarray(self._lengths)
        prefixes = [np.asarray(hashes) for hashes in self._prefixes]
        if only is not None:
            chosen = np.isin(rows, np.fromiter(only, np.uint64))
            rows, lengths, prefixes = rows[chosen], lengths[chosen], [hashes[chosen] for hashes in prefixes]
        # The last key is the first to sort by.
        keys = [rows, _descending(lengths)]
        for hashes in reversed(prefixes):
            shared, longest = _shared(hashes, lengths)
            keys += [shared, _descending(longest)]
        return map(int, rows[np.lexsort(keys)])


def _shared(hashes: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(hash where another row has it too, else 0; the longest row of the group, or the row's own length)."""
    _, group, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    longest = np.zeros(len(counts), np.uint64)
    np.maximum.at(longest, group, lengths)
    alone = (counts[group] < 2) | (hashes == 0)
    return np.where(alone, 0, hashes), np.where(alone, lengths, longest[group])


def _descending(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.uint64(_MAX) - values


def _hash(token_ids: Sequence[int]) -> int:
    """Never 0, which stands for a prompt that is shorter. Equal in every process: integers hash to what they are."""
    return hash(tuple(token_ids)) & _MAX | 1


class Pending:
    """`rows` are numbers of rows that can be run, in their order; `bad` are the rows that cannot."""

    def __init__(self, state: JobState, file: RowFile, rows: Sequence[int], bad: Iterable[RowFailure] = ()) -> None:
        self._state = state
        self._file = file
        self._rows = rows
        self._bad = bad

    def waves(self) -> Iterator[Iterator[Row | RowFailure]]:
        """Each wave is to be finished before the next begins: a process that dies in one was killed by a row of it."""
        yield iter(self._bad)
        # Taken once: rows leave the suspects as they are answered.
        isolated = {row for row, suspicion in self._state.suspects.items() if suspicion.isolated}
        for row in self._rows if isolated else ():
            if row in isolated:
                yield map(self._suspect, [row])
        yield (self._read(row) for row in self._rows if row not in isolated)

    def _suspect(self, row: int) -> Row | RowFailure:
        read, suspicion = self._read(row), self._state.suspects[row]
        if not suspicion.condemned:
            return read
        return read.failure(ErrorCode.WORKER_CRASHED, f"{suspicion}; it is not run again")

    def _read(self, row: int) -> Row:
        return self._file.row(row)
