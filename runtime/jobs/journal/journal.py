"""A job's journal: created once, recovered at every start, appended to by one process at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ....offload.atomic_file import write_atomically
from ...settings.errors import BadJournal, JournalFailed
from .committer import Ballast, Committer, Mark
from .record import VERSION, Done, JournalScan, Kind, chained, encode, encode_done, frame
from .state import Ending, JobState, replay

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class RecordFile:
    """Appends chained records behind byte `end`, whose record has the CRC32 `crc`. Knows no kinds of records.

    Of a record that a full disk refuses nothing remains; the ballast makes space for the last ones of a job.
    """

    def __init__(self, path: Path, descriptor: int, end: int, crc: int, ballast: Ballast) -> None:
        self.end = end
        self.crc = crc
        self.ballast = ballast
        self._path = path
        self._descriptor = descriptor
        self._full: OSError | None = None

    def append(self, *payloads: bytes) -> list[int]:
        """One write for all of them; returns where each begins. Raises JournalFailed where none was written."""
        lines, begins, end, crc = [], [], self.end, self.crc
        for payload in payloads:
            lines.append(frame(payload, crc))
            begins.append(end)
            end, crc = end + len(lines[-1]), chained(payload, crc)
        self._write(b"".join(lines))
        self.end, self.crc = end, crc
        return begins

    def raise_full(self) -> None:
        """Raises JournalFailed once after a write that took the ballast: the stop that follows may still be written."""
        full, self._full = self._full, None
        if full is not None:
            raise self._failed(full) from full

    def _write(self, lines: bytes) -> None:
        try:
            self._write_all(lines)
        except OSError as error:
            os.ftruncate(self._descriptor, self.end)
            if error.errno not in _DISK_FULL or not self.ballast.drop():
                raise self._failed(error) from error
            self._full = error
            self._retry_write(lines)

    def _retry_write(self, lines: bytes) -> None:
        """With the blocks that the ballast had."""
        try:
            self._write_all(lines)
        except OSError as error:
            os.ftruncate(self._descriptor, self.end)
            raise self._failed(error) from error

    def _write_all(self, lines: bytes) -> None:
        position = 0
        while position < len(lines):
            position += os.pwrite(self._descriptor, lines[position:], self.end + position)

    def _failed(self, error: OSError) -> JournalFailed:
        return JournalFailed(
            f"{self._path} could not be written ({error.strerror}); rows confirmed before are safe. "
            "Free some disk space or look after the disk, then start the same command again"
        )


class Journal:
    """Appends from one thread; a row counts once `committed` includes it. `state` covers what is written so far."""

    def __init__(self, path: Path, ballast: Path | None = None) -> None:
        """Recovers the journal at `path`. Raises BadJournal, OtherVersion, FileNotFoundError."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.state, scan = _recover(path, self._descriptor)
            # What a killed process had written need not be on disk yet; nothing counts before it is.
            os.fdatasync(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.num_torn_nbytes = scan.torn_nbytes
        self._records = RecordFile(path, self._descriptor, scan.end, scan.crc, Ballast(ballast))
        self._committer = Committer(self._descriptor, self._mark())

    @classmethod
    def create(cls, path: Path, opened: Mapping[str, Any], ballast: Path | None = None) -> Self:
        """A new journal with its first record, which needs `num_rows`; it is on disk when this returns."""
        write_atomically(path, frame(encode(Kind.OPEN, 0, {"version": VERSION, **opened}), 0))
        return cls(path, ballast)

    @property
    def committed(self) -> Mark:
        """Rows that no crash can take any more. Raises JournalFailed once the disk has failed."""
        self._committer.check()
        return self._committer.synced

    def start(self, ending: Ending, **facts: Any) -> None:
        """A process begins to work on the job; `ending` is how the one before it ended."""
        self._records.ballast.fill()
        self._append(Kind.START, ending=ending, **facts)
        self.sync()

    def begin(self, rows: Iterable[int]) -> None:
        """Rows go into work. In the page cache when this returns, which is what outlives the death of the process."""
        self._append(Kind.BEGIN, rows=list(rows))

    def done(self, *rows: Done) -> None:
        """Rows have their answers. Raises JournalFailed on a full disk, with them saved if the ballast was enough."""
        if not rows:
            return
        self._committer.check()
        synced = self._committer.synced.end
        begins = self._records.append(*(encode_done(row, synced) for row in rows))
        for begin, row in zip(begins, rows, strict=True):
            self.state.done(begin, row)
        self._report()

    def retry(self, rows: Iterable[int]) -> None:
        self._append(Kind.RETRY, rows=list(rows))

    def exported(self, **facts: Any) -> None:
        self._append_settled(Kind.EXPORT, **facts)

    def cancel(self, at: str) -> None:
        self._append_settled(Kind.CANCEL, at=at)

    def stop(self, reason: str) -> None:
        """The process ends on purpose: rows still in work are not to blame for it."""
        self._append_settled(Kind.STOP, reason=reason)

    def sync(self) -> None:
        """Returns when all records are on disk. Raises JournalFailed where they will not be."""
        self._committer.wait()

    def close(self) -> None:
        self._committer.close()
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, kind: Kind, **content: Any) -> None:
        self._committer.check()
        payload = encode(kind, self._committer.synced.end, content)
        (begin,) = self._records.append(payload)
        self.state.apply(begin, payload)
        self._report()

    def _append_settled(self, kind: Kind, **content: Any) -> None:
        """The record says that all before it is on disk: from now on, damage there is not taken for a torn tail."""
        self.sync()
        self._append(kind, **content)
        self.sync()

    def _report(self) -> None:
        """To the committer, what was written; to the caller, a disk that is full."""
        self._committer.written(self._mark())
        self._records.raise_full()

    def _mark(self) -> Mark:
        return Mark(self._records.end, self.state.counts.ok, self.state.counts.failed)


def _recover(path: Path, descriptor: int) -> tuple[JobState, JournalScan]:
    """What the journal holds; a torn end is cut off."""
    # After an fsync that failed, memory may hold pages that the disk does not: read what the disk has.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with open(descriptor, "rb", closefd=False) as file:
        state, scan = replay(file)
    if scan.corrupt or not state.opened:
        raise BadJournal(
            f"{path} is damaged at byte {scan.end}, where it had been safely on disk; "
            "`moedge jobs repair` keeps every answer that is whole and has the others computed again"
        )
    if scan.torn_nbytes:
        os.ftruncate(descriptor, scan.end)
    return state, scan
