"""A job's journal: created once, recovered at every start, appended to by one process at a time, and read back;
`repair` saves what is whole in a damaged one.

Writing and making durable are apart: one thread, the `Committer`, makes the bytes durable and says up to where they
are. A slow disk delays what counts as done, never the next pass; whatever was written while the last fdatasync ran goes
with the next one. Torch-free.
"""

import errno
import json
import os
import re
import threading
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from ....offload.atomic_file import AtomicFile, rename, write_atomically
from ....offload.closing import Closing
from ...rows.row import Row
from ...settings.errors import BadJournal, JournalFailed
from .state import (
    HEAD_NBYTES,
    VERSION,
    CutChoice,
    Done,
    Ending,
    JobState,
    JournalScan,
    Kind,
    decode_done,
    decode_progress,
    encode,
    encode_done,
    encode_progress,
    frame,
    printed_crc,
    refuse_version,
    replay,
    salvage,
)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


# Rows that finish within this time share one fdatasync.
LINGER_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a record in the journal: the byte after it, and how many rows had answers and errors by then.

    `continued` counts answers of cut rows that were replaced by then.
    """

    end: int = 0
    ok: int = 0
    failed: int = 0
    continued: int = 0


class Committer:
    """Owns no file: it synchronizes `descriptor` until it is closed. A failed fdatasync is never tried again.

    `synced` are the counts of records that are synchronized to disk.
    """

    def __init__(self, descriptor: int, synced: Mark) -> None:
        self._descriptor = descriptor
        lock = threading.Lock()
        # Apart, so that a row that is written does not wake a thread that waits for something else.
        self._work = threading.Condition(lock)
        self._hurry = threading.Condition(lock)
        self._settled = threading.Condition(lock)
        self._written = synced
        self.synced = synced
        self._urgent = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="committer", daemon=True)
        self._thread.start()

    def written(self, mark: Mark) -> None:
        """Tells that the file reaches up to `mark`. Raises JournalFailed once the disk has failed."""
        with self._work:
            self.check()
            self._written = mark
            self._work.notify()

    def wait(self) -> None:
        """Returns when all that was written is on disk. Raises JournalFailed where it never will be."""
        with self._settled:
            self._urgent = True
            self._hurry.notify()
            while self.synced != self._written:
                self.check()
                self._settled.wait()
            self.check()

    def close(self) -> None:
        """Ends the thread; what was not synchronized may be lost with the power, and with it only."""
        with self._work:
            self._closed = True
            self._work.notify()
            self._hurry.notify()
        self._thread.join()

    def _serve(self) -> None:
        while (mark := self._next()) is not None:
            try:
                os.fdatasync(self._descriptor)
            except BaseException as error:
                # Whatever it is, it must reach the one who waits.
                self._settle(failure=error)
                return
            self._settle(synced=mark)

    def _next(self) -> Mark | None:
        with self._work:
            self._work.wait_for(lambda: self._closed or self.synced != self._written)
            self._hurry.wait_for(lambda: self._closed or self._urgent, LINGER_SECONDS)
            self._urgent = False
            return None if self._closed else self._written

    def _settle(self, synced: Mark | None = None, failure: BaseException | None = None) -> None:
        with self._settled:
            self.synced = synced or self.synced
            self._failure = failure
            self._settled.notify_all()

    def check(self) -> None:
        """Raises JournalFailed once the disk has failed."""
        if self._failure is not None:
            # The kernel may have dropped the pages it could not write: a second fsync would report success for them.
            raise JournalFailed(
                f"the journal could not be written to disk ({self._failure}); rows that were confirmed are safe. "
                "Check the disk, then run the same command again"
            ) from self._failure


BALLAST_NBYTES = 4 << 20


class Ballast:
    """A file of reserved blocks; without a path, none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def fill(self) -> None:
        """Reserves the blocks; where the disk has none, the job's first answer will say so."""
        if self._path is None or (self._path.exists() and self._path.stat().st_size == BALLAST_NBYTES):
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, BALLAST_NBYTES)
            finally:
                os.close(descriptor)
        except OSError:
            self.drop()

    def drop(self) -> bool:
        """Frees the blocks; whether there were any."""
        with suppress(OSError):
            if self._path is not None:
                os.unlink(self._path)
                return True
        return False


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
            end, crc = end + len(lines[-1]), zlib.crc32(payload, crc)
        self._write(b"".join(lines))
        self.end, self.crc = end, crc
        return begins

    def raise_full(self) -> None:
        """Raises JournalFailed once after a write that took the ballast: the stop that follows may still be written."""
        full, self._full = self._full, None
        if full is not None:
            raise self._failed(full) from full

    def _write(self, lines: bytes) -> None:
        position = 0
        try:
            while position < len(lines):
                position += os.pwrite(self._descriptor, lines[position:], self.end + position)
        except OSError as error:
            os.ftruncate(self._descriptor, self.end)
            if error.errno not in _DISK_FULL or not self.ballast.drop():
                raise self._failed(error) from error
            # Once more, with the blocks that the ballast had.
            self._full = error
            self._write(lines)

    def _failed(self, error: OSError) -> JournalFailed:
        return JournalFailed(
            f"{self._path} could not be written ({error.strerror}); rows that were confirmed are safe. "
            "Free some disk space or check the disk, then run the same command again"
        )


class Journal(Closing):
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

    def progress(self, rows: Mapping[int, Sequence[CutChoice]]) -> None:
        """What the choices of rows in work have generated since this was called for them before."""
        if not rows:
            return
        self._committer.check()
        synced = self._committer.synced.end
        payloads = [encode_progress(row, choices, synced) for row, choices in rows.items()]
        for begin, (row, choices) in zip(self._records.append(*payloads), rows.items(), strict=True):
            self.state.progress(begin, row, sum(len(each.token_ids) for each in choices))
        self._report()

    def retry(self, rows: Iterable[int]) -> None:
        self._append(Kind.RETRY, rows=list(rows))

    def extend(self, **facts: Any) -> None:
        """The input has grown at its end: `num_rows`, `input` and `endpoints` as in the first record."""
        self._append_settled(Kind.EXTEND, **facts)

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

    def _append(self, kind: Kind, **content: Any) -> None:
        self._committer.check()
        payload = encode(kind, self._committer.synced.end, content)
        (begin,) = self._records.append(payload)
        self.state.apply(begin, payload)
        self._report()

    def _append_settled(self, kind: Kind, **content: Any) -> None:
        """Records that everything before is on disk: damage there is then not mistaken for a torn tail."""
        self.sync()
        self._append(kind, **content)
        self.sync()

    def _report(self) -> None:
        """Passes written records to the committer, and a full disk to the caller."""
        self._committer.written(self._mark())
        self._records.raise_full()

    def _mark(self) -> Mark:
        return Mark(self._records.end, self.state.counts.ok, self.state.counts.failed, self.state.num_continued)


def _recover(path: Path, descriptor: int) -> tuple[JobState, JournalScan]:
    """The state of the journal; truncates a torn end."""
    # After an fsync that failed, memory may hold pages that the disk does not: read what the disk has.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with open(descriptor, "rb", closefd=False) as file:
        state, scan = replay(file)
    if scan.corrupt or not state.opened:
        raise BadJournal(
            f"{path} is damaged at byte {scan.end}, where its records had been synchronized; "
            "`moedge jobs repair` keeps every intact answer and computes the others again"
        )
    if scan.torn_nbytes:
        os.ftruncate(descriptor, scan.end)
    return state, scan


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


class EarlierRuns:
    """What rows that are to be run have generated before: those that were in work when a run ended, and the cut rows
    that are continued to `max_tokens`, in all their choices that were cut.
    """

    def __init__(
        self,
        journal: Path | None = None,
        state: JobState | None = None,
        max_tokens: int = 0,
        only: Container[int] | None = None,
    ) -> None:
        """Without a journal there is nothing; without `max_tokens` no cut row is continued, and with `only` none but
        these. The choices are read from the journal when a row starts."""
        self._journal = journal
        self._state = state or JobState()
        self._max_tokens = max_tokens
        # Cut rows that are continued.
        cut = self._state.cut_rows(max_tokens)
        self.cut_rows: Sequence[int] = [row for row in cut if only is None or row in only]
        self._members = frozenset(self.cut_rows)

    def longer(self, row: Row) -> Row:
        """The row with its new `max_tokens`, if it is a cut row."""
        if row.index not in self._members:
            return row
        return replace(row, params=replace(row.params, max_tokens=self._max_tokens))

    def choices(self, row: int) -> Sequence[CutChoice]:
        """What the choices of a row have generated so far; empty for one that starts anew."""
        if self._journal is None:
            return ()
        parts = list[Sequence[CutChoice]]()
        if row in self._members and (offset := self._state.cut_offset(row)) is not None:
            parts.append(read_answer(self._journal, row, offset).choices)
        if (unfinished := self._state.unfinished.get(row)) is not None:
            parts += _read_progress(self._journal, unfinished.offsets)
        return tuple(map(_joined, *parts)) if parts else ()


def _read_progress(journal: Path, offsets: Iterable[int]) -> Iterator[tuple[CutChoice, ...]]:
    with journal.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            yield decode_progress(file.readline()[HEAD_NBYTES:-1])


def _joined(*parts: CutChoice) -> CutChoice:
    """What one choice generated in several records, one after the other."""
    return CutChoice(
        [token_id for part in parts for token_id in part.token_ids],
        [logprob for part in parts for logprob in part.logprobs],
        [logprob for part in parts for logprob in part.prompt_logprobs],
    )


_EXTENDS = re.compile(rb'\{"kind":"extend"')


@dataclass(frozen=True, slots=True)
class Repaired:
    """Rows whose answers were kept, lines of the journal that were not whole, and where the damaged journal is now."""

    rows: int
    lost: int
    damaged: Path


def repair(path: Path) -> Repaired:
    """Rewrites the journal from its intact records; the caller holds the lock of the job.

    Only the first record, those that extend it, and each row's last answer are kept: what processes did to each other
    is over. Raises BadJournal if the first record is damaged, because it holds the request, and OtherVersion.
    """
    with path.open("rb") as file:
        lost = sum(1 for _ in file) - sum(1 for _ in salvage(file))
        last = _last_answers(file)
        with AtomicFile(path) as new:
            _write(new, _kept(file, last))
            damaged = path.with_suffix(".damaged")
            rename(path, damaged)
            new.publish()
    return Repaired(len(last), lost, damaged)


def _last_answers(file: BinaryIO) -> dict[int, int]:
    """Row to the number of the sound record that answers it last. Checks the first record."""
    last: dict[int, int] = {}
    for number, payload in enumerate(salvage(file)):
        if number == 0:
            if not payload.startswith(b'{"kind":"open"'):
                break
            # Answers in records that this version does not know would be dropped.
            refuse_version(json.loads(payload))
        if (done := decode_done(payload, with_line=False)) is not None:
            last[done.row] = number
    else:
        return last
    raise BadJournal("the first record, which describes the job, is damaged; start the job over")


def _kept(file: BinaryIO, last: dict[int, int]) -> Iterator[bytes]:
    for number, payload in enumerate(salvage(file)):
        done = decode_done(payload, with_line=False)
        if number == 0 or _EXTENDS.match(payload) or (done is not None and last[done.row] == number):
            yield payload


def _write(new: AtomicFile, payloads: Iterator[bytes]) -> None:
    crc = 0
    for payload in payloads:
        # Offsets of the old file mean nothing in the new one, which is on disk as a whole.
        head, _, rest = payload.partition(b'"synced":')
        line = frame(head + b'"synced":0' + rest.lstrip(b"0123456789"), crc)
        new.write(line)
        crc = printed_crc(line) or 0
