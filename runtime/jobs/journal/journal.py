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


class Journal:
    """Appends from one thread; a row counts once `committed` includes it. `state` covers what is written so far."""

    def __init__(self, path: Path, ballast: Path | None = None) -> None:
        """Recovers the journal at `path`. Raises BadJournal, OtherVersion, FileNotFoundError."""
        self._path = path
        self._ballast = Ballast(ballast)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.state, scan = self._recover()
            # What a killed process had written need not be on disk yet; nothing counts before it is.
            os.fdatasync(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.num_torn_nbytes = scan.torn_nbytes
        self._end, self._crc = scan.end, scan.crc
        self._full: OSError | None = None
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
        self._ballast.fill()
        self._append_as(Kind.START, ending=ending, **facts)
        self.sync()

    def begin(self, rows: Iterable[int]) -> None:
        """Rows go into work. In the page cache when this returns, which is what outlives the death of the process."""
        self._append_as(Kind.BEGIN, rows=list(rows))

    def done(self, *rows: Done) -> None:
        """Rows have their answers. Raises JournalFailed on a full disk, with them saved if the ballast was enough."""
        if not rows:
            return
        synced = self._committer.synced.end
        begins = self._append(*(encode_done(row, synced) for row in rows))
        for begin, row in zip(begins, rows, strict=True):
            self.state.done(begin, row)
        self._tell()

    def retry(self, rows: Iterable[int]) -> None:
        self._append_as(Kind.RETRY, rows=list(rows))

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

    def _recover(self) -> tuple[JobState, JournalScan]:
        """What the journal holds; a torn end is cut off."""
        # After an fsync that failed, memory may hold pages that the disk does not: read what the disk has.
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with open(self._descriptor, "rb", closefd=False) as file:
            state, scan = replay(file)
        if scan.corrupt or not state.opened:
            raise BadJournal(
                f"{self._path} is damaged at byte {scan.end}, where it had been safely on disk; "
                "`moedge jobs repair` keeps every answer that is whole and has the others computed again"
            )
        if scan.torn_nbytes:
            os.ftruncate(self._descriptor, scan.end)
        return state, scan

    def _append_as(self, kind: Kind, **content: Any) -> None:
        payload = encode(kind, self._committer.synced.end, content)
        (begin,) = self._append(payload)
        self.state.apply(begin, payload)
        self._tell()

    def _append_settled(self, kind: Kind, **content: Any) -> None:
        """The record says that all before it is on disk: from now on, damage there is not taken for a torn tail."""
        self.sync()
        self._append_as(kind, **content)
        self.sync()

    def _append(self, *payloads: bytes) -> list[int]:
        """One write for all of them; returns where each begins."""
        self._committer.check()
        lines, begins, end, crc = [], [], self._end, self._crc
        for payload in payloads:
            lines.append(frame(payload, crc))
            begins.append(end)
            end, crc = end + len(lines[-1]), chained(payload, crc)
        self._write(b"".join(lines))
        self._end, self._crc = end, crc
        return begins

    def _tell(self) -> None:
        """The committer of what was written; whoever writes, of a disk that is full."""
        self._committer.written(self._mark())
        self._raise_full()

    def _write(self, lines: bytes) -> None:
        try:
            self._write_all(lines)
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            if error.errno not in _DISK_FULL or not self._ballast.drop():
                raise _failed(self._path, error) from error
            self._full = error
            self._retry_write(lines)

    def _retry_write(self, lines: bytes) -> None:
        """With the blocks that the ballast had."""
        try:
            self._write_all(lines)
        except OSError as error:
            os.ftruncate(self._descriptor, self._end)
            raise _failed(self._path, error) from error

    def _write_all(self, lines: bytes) -> None:
        position = 0
        while position < len(lines):
            position += os.pwrite(self._descriptor, lines[position:], self._end + position)

    def _raise_full(self) -> None:
        """Once: the stop that follows may still be written."""
        full, self._full = self._full, None
        if full is not None:
            raise _failed(self._path, full) from full

    def _mark(self) -> Mark:
        return Mark(self._end, self.state.counts.ok, self.state.counts.failed)


def _failed(path: Path, error: OSError) -> JournalFailed:
    return JournalFailed(
        f"{path} could not be written ({error.strerror}); rows confirmed before are safe. "
        "Free some disk space or look after the disk, then start the same command again"
    )
