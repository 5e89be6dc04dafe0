"""The files of a folder, read and split on a thread of its own, whose rows are appended to a round meanwhile.

Everything here may be lost at any moment: what was read comes from the cache the next time, and rows that are in the
file of a round, or have an answer, are not added twice.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Condition, Event, Thread
from typing import NamedTuple, Self

from ...runtime.api.face import Growth, Line, RowIndex, Workload, sync_folder
from .document import Document, UnreadDocument
from .file_walk import FoundFile
from .rounds import Answers, Entry, EntryLog, Round, Rounds, RowLines

# Documents of all types and sizes that are read before the first row runs: the plan and the estimate come of them.
READ_FIRST = 16
# Where they take longer, what there is by then has to do.
_READ_FIRST_SECONDS = 10.0
# Rows that wait for a running engine when reading pauses. Reading takes processors from it, so it goes on at the rate
# of the answers; an engine that takes this many at once gets more as fast as they can be read.
ROWS_AHEAD = 256
_WAIT_SECONDS = 0.2


class AskedRow(NamedTuple):
    """A row of a document, and the tokens of its prompt."""

    row_id: str
    prompt: str
    num_tokens: int


class GrowingFile:
    """The file of the rows of a round, to which rows are appended; a row that a kill cut off is cut away."""

    def __init__(self, path: Path) -> None:
        new = not path.exists()
        self._file = path.open("a+b")
        self._hashed = sha256()
        self.num_rows = self.nbytes = 0
        self._index: RowIndex | None = None
        if new:
            sync_folder(path.parent)

    def ids(self) -> Iterator[str]:
        """Of the rows that are there; to be read to the end before anything is appended."""
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            self._count(line)
            yield json.loads(line)["id"]
        self._file.truncate(self.nbytes)

    def note_in(self, index: RowIndex) -> None:
        """Rows are noted there from now on; it has those so far."""
        self._index = index

    def append(self, row: AskedRow) -> None:
        content = json.dumps({"id": row.row_id, "prompt": row.prompt}, separators=(",", ":")).encode()
        self._file.write(content + b"\n")
        if self._index is not None:
            self._index.add(Line(self.num_rows + 1, self.nbytes, content))
        self._count(content + b"\n")

    def sync(self) -> Growth:
        """All rows so far, on disk."""
        self._file.flush()
        os.fdatasync(self._file.fileno())
        return Growth(self.num_rows, self.nbytes, self._hashed.hexdigest())

    def close(self) -> None:
        self._file.close()

    def _count(self, line: bytes) -> None:
        self._hashed.update(line)
        self.nbytes += len(line)
        self.num_rows += 1


@dataclass(slots=True)
class _Tally:
    """What the documents of one type came to."""

    files: int = 0
    nbytes: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, nbytes: int, rows: Sequence[AskedRow]) -> None:
        self.files += 1
        self.nbytes += nbytes
        self.rows += len(rows)
        self.tokens += sum(each.num_tokens for each in rows)


@dataclass(slots=True)
class Expected:
    """How many rows and prompt tokens all files come to, by those that were read, each type by itself.

    `longest` is the longest prompt so far.
    """

    files: Counter[str]
    nbytes: Counter[str]
    longest: int = 0
    tallies: dict[str, _Tally] = field(default_factory=dict)
    biggest: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Sequence[FoundFile]) -> Self:
        found = cls(Counter(), Counter())
        for each in files:
            found.files[_suffix(each)] += 1
            found.nbytes[_suffix(each)] += each.nbytes
            found.biggest[_suffix(each)] = max(each.nbytes, found.biggest.get(_suffix(each), 0))
        return found

    def among(self, files: Sequence[FoundFile]) -> Expected:
        """The same for other files, by what these came to."""
        found = Expected.of(files)
        found.longest, found.tallies = self.longest, self.tallies
        return found

    def add(self, found: FoundFile, rows: Sequence[AskedRow]) -> None:
        self.tallies.setdefault(_suffix(found), _Tally()).add(found.nbytes, rows)
        self.longest = max([self.longest, *(each.num_tokens for each in rows)])

    @property
    def rows(self) -> float:
        return sum(count * _share(each.rows, each.files) for count, each in self._types(self.files))

    @property
    def tokens(self) -> float:
        return sum(count * _share(each.tokens, each.nbytes) for count, each in self._types(self.nbytes))

    def longest_of(self, most: int) -> int:
        """The longest prompt to expect, of at most `most` tokens: twice what the biggest file has by its bytes."""
        found = max(
            (nbytes * _share(each.tokens, each.nbytes) for nbytes, each in self._types(self.biggest)), default=0
        )
        return min(most, max(self.longest, round(2 * found)))

    def workload(self, max_tokens: int, longest: int) -> Workload:
        """Rows of prompts of at most `longest` tokens, and answers of `max_tokens`."""
        rows = max(1, round(self.rows))
        return Workload(rows, longest + max_tokens, None, max(1, round(self.tokens)), rows * max_tokens)

    def _types(self, counts: Mapping[str, int]) -> Iterator[tuple[int, _Tally]]:
        """Of a type that was not read yet, the mean of all others is what is known."""
        every = _Tally()
        for each in self.tallies.values():
            every = _Tally(*(a + b for a, b in zip(_numbers(every), _numbers(each), strict=True)))
        return ((count, self.tallies.get(suffix, every)) for suffix, count in counts.items())


def _numbers(tally: _Tally) -> tuple[int, ...]:
    return tally.files, tally.nbytes, tally.rows, tally.tokens


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _suffix(found: FoundFile) -> str:
    return Path(found.path).suffix.lower()


Read = Callable[[Event], Iterator[tuple[int, Document | UnreadDocument]]]
# The entry of a document, and the rows that ask about its chunks.
Split = Callable[[Document | UnreadDocument], tuple[Entry, list[AskedRow]]]


class Reading:
    """Reads while it is open, but while rows run no further than ROWS_AHEAD rows ahead of them.

    A row of more than `longest` tokens is left out and makes `deferred` grow: it is for a later round, whose engine
    has memory for it.
    """

    def __init__(
        self, rounds: Rounds, answers: Answers, files: Sequence[FoundFile], log: EntryLog, most: int | None = None
    ) -> None:
        """`log` gets the entries; prompts of `most` tokens or more are `deferred` where that is given."""
        self._rounds = rounds
        self._answers = answers
        self._files = files
        self._log = log
        self.expected = Expected.of(files)
        self.longest = most
        self.deferred = self.num_read = 0
        self._changed = Condition()
        self._stop = Event()
        self._done = False
        self._failure: BaseException | None = None
        self._thread: Thread | None = None
        # Rows of the round that an earlier run began: of this one, no file is read twice.
        self._begun: RowLines | None = None
        self._round: Round | None = None
        self._file: GrowingFile | None = None
        # Rows of the file that were there when it was last looked at, and that are in work or behind it.
        self._given = self._taken = 0
        self._running = False
        if (begun := rounds.unfinished) is not None:
            self._taken = self._begin(begun).num_rows
            self._begun = RowLines([begun.rows])

    @contextmanager
    def running(self, read: Read, split: Split) -> Iterator[Self]:
        """While open, files are read and split; both are called on the thread."""
        self._thread = Thread(target=self._serve, args=(read, split), name="reading", daemon=True)
        self._thread.start()
        try:
            yield self
        finally:
            with self._changed:
                self._stop.set()
                self._changed.notify_all()
            self._thread.join()
            self._close()

    @property
    def total(self) -> int:
        return len(self._files)

    @property
    def done(self) -> bool:
        """Whether no more files are read: all were, or it was stopped."""
        return self._done

    @property
    def complete(self) -> bool:
        """Whether every file was read."""
        return self.num_read == self.total

    def next_round(self, progress: Callable[[int, int], None], every: bool = False) -> Round | None:
        """Waits for enough rows to begin with, or for `every` row; None where all have answers.

        Raises what ended the reading.
        """
        begun = time.monotonic()
        with self._changed:
            self._run(False)
            while not self._done and (every or not self._enough(time.monotonic() - begun)):
                self._changed.wait(_WAIT_SECONDS)
                progress(self.num_read, self.total)
            if self._failure is not None:
                raise self._failure
            if self._file is None or not self._file.num_rows:
                return None
            self._file.sync()
            return self._round

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No row is appended while it is open: somebody reads the file as it is."""
        with self._changed:
            if self._file is not None:
                self._file.sync()
                self._given = self._taken = self._file.num_rows
            yield
            # The engine is to be loaded: what is read meanwhile takes nothing from it.
            self._run(False)

    def note_in(self, index: RowIndex) -> None:
        """From now on rows are noted there, behind those that `paused` has found."""
        if self._file is not None:
            self._file.note_in(index)

    def close_round(self, current: Round) -> None:
        """Later rows go to another round. Nothing happens where they do already."""
        with self._changed:
            if self._round is current:
                self._close()
            self._run(False)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._round = None

    @property
    def finished(self) -> bool:
        with self._changed:
            return self._done and not self._new()

    def grown(self, wait: bool) -> Growth | None:
        """As `RowFeed` says."""
        with self._changed:
            self._run(True)
            if wait and not self._new() and not self._done:
                self._changed.wait(_WAIT_SECONDS)
            if self._file is None or not self._new():
                return None
            growth = self._file.sync()
            self._given = growth.num_rows
            return growth

    def took(self, num_rows: int) -> None:
        """As `RowFeed` says."""
        with self._changed:
            self._taken = num_rows
            self._run(True)

    def _run(self, running: bool) -> None:
        """Whether rows run."""
        self._running = running
        self._changed.notify_all()

    def _new(self) -> bool:
        return self._file is not None and self._file.num_rows > self._given

    def _enough(self, seconds: float) -> bool:
        if self._file is None or not self._file.num_rows:
            return False
        return self.num_read >= READ_FIRST or seconds > _READ_FIRST_SECONDS

    def _begin(self, current: Round) -> GrowingFile:
        self._round, self._file = current, GrowingFile(current.rows)
        self._given = self._taken = 0
        for _ in self._file.ids():
            pass
        return self._file

    def _serve(self, read: Read, split: Split) -> None:
        try:
            for number, found in read(self._stop):
                entry, rows = split(found)
                with self._changed:
                    self._take(number, entry, rows)
                    self._changed.notify_all()
                    self._changed.wait_for(self._may_read_on)
                if self._stop.is_set():
                    break
        except BaseException as error:
            # Rows so far are answered; whoever asks for another round gets it.
            self._failure = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _may_read_on(self) -> bool:
        """Whether it was stopped, no row runs, or whoever runs them needs more of them soon."""
        if self._stop.is_set() or not self._running or self._file is None:
            return True
        return self._file.num_rows - self._taken < ROWS_AHEAD

    def _take(self, number: int, entry: Entry, rows: list[AskedRow]) -> None:
        self.num_read += 1
        self._log.add(number, entry)
        self.expected.add(self._files[number], rows)
        for row in rows:
            if row.row_id in self._answers or (self._begun is not None and row.row_id in self._begun):
                continue
            if self.longest is not None and row.num_tokens > self.longest:
                self.deferred += 1
                continue
            if self._file is None:
                self._begin(self._rounds.new())
            assert self._file is not None
            self._file.append(row)
