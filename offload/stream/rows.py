"""Rows of a large matrix that stays in files: those that a pass looks up are read in one batch, popular ones are kept.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .reader_lane import BUFFER_NBYTES, NUM_THREADS, DirectFile, ThreadBuffer
from .stream import ALIGNMENT, StreamBroken

# Rows that lie together are read together, up to this many bytes and a row; so many bytes of reads are a thread's turn.
_RANGE_NBYTES = BUFFER_NBYTES // 4
_TURN_NBYTES = BUFFER_NBYTES // 2
LARGEST_ROW = BUFFER_NBYTES // 4
# A popular row gives way to others when they were looked up this often more than it was.
_MOST_USES = 3
# Odd, and far from sums of few powers of two: neighbours lie apart (Knuth, multiplicative hashing).
_SPREAD = np.uint64(0x9E3779B97F4A7C15)

Rows = NDArray[np.int64]
Bytes = NDArray[np.uint8]


class TablePart(NamedTuple):
    """`rows` rows of a matrix, one behind the other from byte `offset` of a file on."""

    path: Path
    offset: int
    rows: int


@dataclass(slots=True)
class RowCounts:
    """Bytes of rows that were `looked_up`, and the rows that these were, each once a batch; of them those that were
    kept, and the reads of the others with their bytes, which are whole blocks."""

    looked_up: int = 0
    rows: int = 0
    kept: int = 0
    reads: int = 0
    nbytes: int = 0

    @classmethod
    def of(cls, parts: Iterable[RowCounts]) -> RowCounts:
        """The sums of several counts."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))


class TableReader:
    """Reads rows of a matrix whose `parts` follow one another; `kept_nbytes` of popular rows stay in memory.

    `close` it; a file that changes meanwhile raises StreamBroken.
    """

    def __init__(self, parts: Sequence[TablePart], row_nbytes: int, kept_nbytes: int = 0) -> None:
        if not 0 < row_nbytes <= LARGEST_ROW:
            raise ValueError(f"rows have {row_nbytes} bytes, wanted 1 to {LARGEST_ROW}")
        self.counts = RowCounts()
        self.row_nbytes = row_nbytes
        self._opened = {path: DirectFile(path) for path in {part.path for part in parts}}
        self._files = [self._opened[part.path] for part in parts]
        # Of each part its first row, and the byte where a row 0 of the matrix would lie in its file.
        self._firsts = np.cumsum([0, *(part.rows for part in parts)])
        self._origins = np.array([part.offset for part in parts]) - self._firsts[:-1] * row_nbytes
        self._kept = _PopularRows(min(kept_nbytes // row_nbytes, len(self)), row_nbytes)
        self._buffer = ThreadBuffer()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "rows")

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def read(self, rows: Rows, lookups: int) -> Bytes:
        """The bytes uint8 [n, row_nbytes] of n rows, ascending and each once, for so many `lookups`.

        Raises IndexError, StreamBroken.
        """
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(self):
            raise IndexError(f"rows from {rows[0]} to {rows[-1]} were looked up, wanted 0 to {len(self) - 1}")
        out = np.empty((len(rows), self.row_nbytes), np.uint8)
        missing = self._kept.find(rows, out)
        self.counts.looked_up += lookups * self.row_nbytes
        self.counts.rows += len(rows)
        self.counts.kept += len(rows) - len(missing)
        if len(missing):
            self._fetch(rows[missing], missing, out)
            self._kept.add(rows[missing], out[missing])
        return out

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for file in self._opened.values():
            file.close()

    def _fetch(self, rows: Rows, places: Rows, out: Bytes) -> None:
        """Reads rows into their places of `out`."""
        parts = np.searchsorted(self._firsts, rows, "right") - 1
        begins = self._origins[parts] + rows * self.row_nbytes
        ends = begins + self.row_nbytes
        firsts, lasts = begins // ALIGNMENT, (ends - 1) // ALIGNMENT
        apart = (firsts[1:] > lasts[:-1] + 1) | (parts[1:] != parts[:-1])
        apart |= begins[1:] // _RANGE_NBYTES != begins[:-1] // _RANGE_NBYTES
        edges = np.concatenate(([0], np.flatnonzero(apart) + 1, [len(rows)]))
        # A range is a read: whole blocks from that of its first row to that of its last one.
        heads = firsts[edges[:-1]] * ALIGNMENT
        sizes = (lasts[edges[1:] - 1] + 1) * ALIGNMENT - heads
        self.counts.reads += len(sizes)
        self.counts.nbytes += int(sizes.sum())

        def turn(ranges: tuple[int, int]) -> None:
            a, b = ranges
            buffer = self._buffer.bytes
            slots = np.concatenate(([0], np.cumsum(sizes[a:b])))
            wanted = ends[edges[a + 1 : b + 1] - 1] - heads[a:b]
            reads = zip(parts[edges[a:b]].tolist(), slots.tolist(), heads[a:b].tolist(), wanted.tolist(), strict=False)
            for part, slot, head, nbytes in reads:
                self._files[part].fetch(buffer[slot:], head, nbytes)
            mine = slice(edges[a], edges[b])
            shifts = np.repeat(slots[:-1] - heads[a:b], np.diff(edges[a : b + 1]))
            windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(buffer, np.uint8), self.row_nbytes)
            out[places[mine]] = windows[begins[mine] + shifts]

        try:
            list(self._threads.map(turn, _turns(sizes)))
            for part in np.unique(parts).tolist():
                self._files[part].check()
        except OSError as error:
            raise StreamBroken(f"{len(rows)} rows of {self._files[0].path} could not be read: {error}") from error


def _turns(sizes: Rows) -> Iterator[tuple[int, int]]:
    """Ranges of `sizes` bytes shared among the threads, as much as a buffer holds at a time."""
    before = np.cumsum(sizes) - sizes
    share = min(_TURN_NBYTES, -(-int(sizes.sum()) // NUM_THREADS))
    edges = [0, *(np.flatnonzero(np.diff(before // share)) + 1).tolist(), len(sizes)]
    yield from pairwise(edges)


class _PopularRows:
    """Rows that are looked up again and again, each in the one of `slots` that its number is hashed to."""

    def __init__(self, slots: int, row_nbytes: int) -> None:
        self._rows = np.full(slots, -1, np.int64)
        self._uses = np.zeros(slots, np.uint8)
        self._bytes = np.empty((slots, row_nbytes), np.uint8)

    def find(self, rows: Rows, out: Bytes) -> Rows:
        """Fills the rows of `out` that are kept; returns the places of the others."""
        if not len(self._rows):
            return np.arange(len(rows))
        slots = self._slots(rows)
        found = self._rows[slots] == rows
        mine = slots[found]
        out[found] = self._bytes[mine]
        self._uses[mine] = np.minimum(self._uses[mine] + 1, _MOST_USES)
        return np.flatnonzero(~found)

    def add(self, rows: Rows, data: Bytes) -> None:
        """Keeps rows that were read where nothing more popular is."""
        if not len(self._rows):
            return
        slots, first = np.unique(self._slots(rows), return_index=True)
        free = self._uses[slots] == 0
        self._rows[slots[free]], self._bytes[slots[free]] = rows[first[free]], data[first[free]]
        self._uses[slots[~free]] -= 1

    def _slots(self, rows: Rows) -> Rows:
        return (((rows.astype(np.uint64) * _SPREAD) >> np.uint64(32)) % np.uint64(len(self._rows))).astype(np.int64)
