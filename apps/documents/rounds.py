"""The rows of a job over documents, in rounds: files of rows, each answered by a batch job.

The first round are chunks of documents, and grows while they are read; later ones are merges of partial answers, and
whatever was added to the folder since. An answer is found again by the id of its row, which says document, level and
number, and what it depends on: where the document is split, or the answers that are merged. An index has an entry for
each document.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import weakref
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, cast

from ...face import AtomicFile, OutputPaths


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one row: its `text`, None where it has none, or `error` with a code and a message.

    `partial` is the text of an answer that was cut within its JSON.
    """

    text: str | None = None
    finish_reason: str | None = None
    usage: Mapping[str, int] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None
    partial: str | None = None
    reasoning: str | None = None

    @property
    def shown(self) -> str:
        """What later rounds get of it."""
        return (self.text if self.text is not None else self.partial) or ""


@dataclass(frozen=True, slots=True)
class Round:
    """`rows` is the input of a batch job, `answers` its output."""

    number: int
    folder: Path

    @property
    def rows(self) -> Path:
        return self.folder / f"{self.number:04d}.jsonl"

    @property
    def answers(self) -> Path:
        return self.folder / f"{self.number:04d}.answers.jsonl"

    @property
    def outputs(self) -> OutputPaths:
        return OutputPaths(self.answers)

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that have its answers and errors so far."""
        paths = self.outputs
        return (paths.out, paths.errors) if self.finished else (paths.partial,)

    @property
    def finished(self) -> bool:
        return self.answers.exists()

    def ids(self, numbers: Container[int]) -> dict[str, int]:
        """The rows of these numbers by their ids."""
        with self.rows.open("rb") as file:
            return {json.loads(line)["id"]: number for number, line in enumerate(file) if number in numbers}

    def write(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Returns their number; without any, nothing is written."""
        count = 0
        with AtomicFile(self.rows) as file:
            for row in rows:
                file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
                count += 1
            if count:
                file.publish()
        return count


class Rounds:
    """The rounds in a folder, and the answers of those that are finished."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def all(self) -> list[Round]:
        numbers = sorted(int(path.name.split(".")[0]) for path in self._folder.glob("????.jsonl"))
        return [Round(number, self._folder) for number in numbers]

    @property
    def first(self) -> Round | None:
        """The one that says with what settings the others are answered."""
        return self.all[0] if self.all else None

    def add(self, rows: Iterable[Mapping[str, Any]]) -> Round | None:
        """The next round, of these rows; None where there are none."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Round(self.all[-1].number + 1 if self.all else 1, self._folder)
        if not made.write(rows):
            return None
        self.all.append(made)
        return made

    def answers(self, noted: Container[str] = ()) -> RowAnswers:
        """Those of the rounds that are finished now, and those that a stopped one has so far."""
        return RowAnswers((path for each in self.all for path in each.files), noted)


class LineOffsets:
    """Where lines begin, by a name that each of them has; of two with one name, the later one.

    They are in a private database, which SQLite keeps on disk but for a cache, and removes when it is closed.
    """

    def __init__(self, lines: Iterable[tuple[str, int]]) -> None:
        self._lines = sqlite3.connect("", check_same_thread=False)
        weakref.finalize(self, self._lines.close)
        self._lines.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._lines.execute("PRAGMA journal_mode = OFF")
        self._lines.execute("CREATE TABLE lines (name BLOB PRIMARY KEY, begin INTEGER) WITHOUT ROWID")
        found = ((_key(name), begin) for name, begin in lines)
        self._lines.executemany("INSERT OR REPLACE INTO lines VALUES (?, ?)", found)
        self._lines.commit()

    def __len__(self) -> int:
        return int(self._lines.execute("SELECT count(*) FROM lines").fetchone()[0])

    def find(self, name: str) -> int | None:
        found = self._lines.execute("SELECT begin FROM lines WHERE name = ?", (_key(name),)).fetchone()
        return None if found is None else int(found[0])


_CACHE_KIB = 4096


def _key(name: str) -> bytes:
    """Names of files may hold bytes that are no text."""
    return name.encode("utf-8", "surrogatepass")


# A line of a file: which file, then the byte.
_OFFSET_BITS = 48


class RowAnswers:
    """The rows of files by the `id` in each, and their answers, read one at a time; of two with one id, the later."""

    def __init__(self, paths: Iterable[Path], noted: Container[str] = ()) -> None:
        """Of the rows in `noted`, those that are looked for are in `wanted`."""
        self.wanted = set[str]()
        self._noted = noted
        self._paths = [path for path in paths if path.exists()]
        self._offsets = LineOffsets(self._lines())

    def __contains__(self, row_id: str) -> bool:
        if row_id in self._noted:
            self.wanted.add(row_id)
        return self._offsets.find(row_id) is not None

    def __getitem__(self, row_id: str) -> Answer:
        if (begin := self._offsets.find(row_id)) is None:
            raise KeyError(row_id)
        with self._paths[begin >> _OFFSET_BITS].open("rb") as file:
            file.seek(begin & (1 << _OFFSET_BITS) - 1)
            found = json.loads(file.readline())
        return Answer(
            found.get("text"), found.get("finish_reason"), found.get("usage", {}), found.get("error"),
            found.get("partial"), found.get("reasoning_content"),
        )  # fmt: skip

    def _lines(self) -> Iterator[tuple[str, int]]:
        for number, path in enumerate(self._paths):
            begin = number << _OFFSET_BITS
            with path.open("rb") as file:
                for line in file:
                    yield json.loads(line)["id"], begin
                    begin += len(line)


@dataclass(frozen=True, slots=True)
class Entry:
    """`chunks` are [start, end, first page, last page] with pages of 0 for texts that have none.

    `facts` are what prompts may use of the document. `error` says why it is not asked about.
    """

    source: str
    sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    chunks: tuple[tuple[int, int, int, int], ...] = ()
    notes: tuple[str, ...] = ()
    error: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        """Identifies the document by its path and its bytes."""
        return _digest(f"{self.sha256}:{self.source}")

    @property
    def chunk_ids(self) -> list[str]:
        """Those of the rows that ask about the chunks: a document that is split elsewhere has others."""
        whole = len(self.chunks) < 2
        key = self.key if whole else _digest(f"{self.sha256}:{self.source}:{self.chunks}")
        return [f"{key}.0.{index}" for index in range(len(self.chunks))]

    def merge_id(self, level: int, index: int, prompt: str) -> str:
        """That of a merge, which has another prompt where an answer that it merges is another."""
        return f"{self.key}.{level}.{index}.{_digest(prompt)}"

    def pages(self, first: int, last: int) -> tuple[int, int] | None:
        """The pages of the chunks `first` to `last`, counted from 0."""
        pages = self.chunks[first][2], self.chunks[last][3]
        return pages if all(pages) else None

    def dumped(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=10).hexdigest()


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of an index, one at a time; none where there is no index."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            found = json.loads(line)
            chunks = tuple(tuple(each) for each in found.pop("chunks"))
            yield Entry(**{**found, "notes": tuple(found["notes"])}, chunks=chunks)


class IndexedEntries:
    """The lines of an index by the names of their documents; those of the file that it was, where it is replaced."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb") if path.exists() else None
        self._offsets = LineOffsets(self._lines())

    def __len__(self) -> int:
        return len(self._offsets)

    def _lines(self) -> Iterator[tuple[str, int]]:
        begin = 0
        for line in self._file or ():
            yield json.loads(line)["source"], begin
            begin += len(line)

    def sha256(self, source: str) -> str | None:
        """The hash of the file; "" for one that could not be read, None for one that was not there."""
        begin = self._offsets.find(source)
        if begin is None or self._file is None:
            return None
        self._file.seek(begin)
        return str(json.loads(self._file.readline())["sha256"])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class EntryLog:
    """Entries in the order in which documents were read, in a file without a name, and given in that of their numbers.

    One thread adds entries, whoever reads them does so afterwards.
    """

    def __init__(self, folder: Path, num_files: int) -> None:
        self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=1 << 20))  # noqa: SIM115
        # One more than where an entry begins: 0 is a file that was not read.
        self._begins = array("Q", bytes(8 * num_files))
        self._end = 0

    def add(self, number: int, entry: Entry) -> None:
        line = entry.dumped() + b"\n"
        self._file.write(line)
        self._begins[number] = self._end + 1
        self._end += len(line)

    def lines(self) -> Iterator[bytes]:
        """The line of every document that was read, by number."""
        self._file.flush()
        for begin in filter(None, self._begins):
            self._file.seek(begin - 1)
            yield self._file.readline()

    def close(self) -> None:
        self._file.close()
