"""The state that the records of a journal add up to: answered rows with their offsets, and suspect rows.

Applies records one by one, read or just written: both ways give the same state.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from ...settings.errors import BadJournal, OtherVersion
from .record import OLDEST_READ, VERSION, Done, JournalScan, Kind, decode_done

_DEATHS_BEFORE_ISOLATION = 2
_NEWER_ADVICE = "Install the moedge that started the job, or a newer one"


class Ending(StrEnum):
    """How the last process of a job ended, as its successor found it.

    OUTSIDE is a death without a trace, such as `kill -9`: it says nothing about the rows that were in work.
    """

    NONE = "none"
    CRASH = "crash"
    OUTSIDE = "outside"
    POWER = "power"


@dataclass(slots=True)
class Suspicion:
    """Crashes of processes that had this row in work; `alone` counts those while it was run alone on purpose."""

    deaths: int = 0
    alone: int = 0

    def count(self) -> None:
        self.alone += self.isolated
        self.deaths += 1

    @property
    def isolated(self) -> bool:
        """Whether the row must run alone."""
        return self.deaths >= _DEATHS_BEFORE_ISOLATION

    @property
    def condemned(self) -> bool:
        """Whether the row becomes an error row: the process died while it ran alone."""
        return self.alone > 0

    def __str__(self) -> str:
        return f"{self.deaths} processes crashed while this row was running, the last one while no other row was"


@dataclass(slots=True)
class Counts:
    """Rows that have answers and rows that have errors, and the tokens that both took.

    `cut` rows are answers or errors that max_tokens ended. `finish_reasons` counts the choices of answers by finish
    reason, `codes` counts errors by code. `cached_tokens` and `reasoning_tokens` are parts of the tokens.
    """

    ok: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cut: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def rows(self) -> int:
        return self.ok + self.failed

    def plus(self, other: Counts) -> Counts:
        """Those of both together."""
        return Counts(
            self.ok + other.ok,
            self.failed + other.failed,
            self.prompt_tokens + other.prompt_tokens,
            self.generated_tokens + other.generated_tokens,
            self.cut + other.cut,
            self.finish_reasons + other.finish_reasons,
            self.codes + other.codes,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def add(self, done: Done, times: int = 1) -> None:
        self.ok += times * (not done.failed)
        self.failed += times * done.failed
        self.prompt_tokens += times * done.prompt_tokens
        self.generated_tokens += times * done.generated_tokens
        self.cached_tokens += times * done.cached_tokens
        self.reasoning_tokens += times * done.reasoning_tokens
        self.cut += times * bool(done.cut)
        outcomes = self.codes if done.failed else self.finish_reasons
        for name, count in done.outcome.items():
            outcomes[name] += times * count
            if not outcomes[name]:
                del outcomes[name]


def refuse_version(opened: Mapping[str, Any]) -> None:
    """Raises OtherVersion where a journal with this first record cannot be read."""
    found = opened.get("version")
    newer = isinstance(found, int) and found > VERSION
    if newer or found not in range(OLDEST_READ, VERSION + 1):
        raise OtherVersion(
            f"the journal was written by {'a newer' if newer else 'an older'} moedge: its version is {found}, and this "
            f"one reads {OLDEST_READ} to {VERSION}. "
            f"{_NEWER_ADVICE if newer else 'Resume the job with the moedge that started it'}"
        )


def replay(file: BinaryIO) -> tuple[JobState, JournalScan]:
    """The state that a journal's sound records come to. Raises BadJournal, OtherVersion."""
    state, scan = JobState(), JournalScan(file)
    for entry in scan:
        state.apply(entry.offset, entry.payload)
    return state, scan


def read_state(path: Path) -> JobState:
    """Reads a journal that another process may be writing, up to the last whole record."""
    with path.open("rb") as file:
        state, _ = replay(file)
    if not state.opened:
        raise BadJournal(f"{path} is not a journal, or its first record is damaged")
    return state


class _Counted:
    """What a cut row added to the counts, some 150 bytes a row: all rows of a long job may be cut, and replaced."""

    _LAYOUT = struct.Struct("<QQQQQ?I")

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}
        self._outcomes: dict[tuple[tuple[str, int], ...], int] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._packed

    def tokens(self) -> Iterator[tuple[int, int]]:
        """Each row, and the tokens after which it was cut."""
        return ((row, self._LAYOUT.unpack(packed)[0]) for row, packed in self._packed.items())

    def put(self, done: Done) -> None:
        outcome = self._outcomes.setdefault(tuple(sorted(done.outcome.items())), len(self._outcomes))
        details = done.cached_tokens, done.reasoning_tokens
        numbers = done.cut, done.prompt_tokens, done.generated_tokens, *details, done.failed, outcome
        self._packed[done.row] = self._LAYOUT.pack(*numbers)

    def pop(self, row: int) -> Done | None:
        if (packed := self._packed.pop(row, None)) is None:
            return None
        cut, prompt, generated, cached, reasoning, failed, index = self._LAYOUT.unpack(packed)
        outcome = next(dict(each) for each, at in self._outcomes.items() if at == index)
        counted = {"cached_tokens": cached, "reasoning_tokens": reasoning}
        return Done(row, failed, prompt, generated, "", "", outcome, cut, **counted)


class JobState:
    """`opened` is the first record, `key_offsets` the digest of the offsets of quantized keys, None for none.

    Eight bytes a row: the offset of its answer in the journal, 0 for none.
    """

    def __init__(self) -> None:
        self.opened: Mapping[str, Any] = {}
        self.counts = Counts()
        self.suspects: dict[int, Suspicion] = {}
        self.started: Mapping[str, Any] | None = None
        self.stopped: Mapping[str, Any] | None = None
        self.exported: Mapping[str, Any] | None = None
        self.export_is_current = False
        self.cancelled: Mapping[str, Any] | None = None
        self.key_offsets: str | None = None
        self._started: set[int] = set()
        self._offsets = array("Q")
        # Codes are shared strings.
        self._failed: dict[int, str] = {}
        self._cut = _Counted()
        self._num_continued = 0

    @property
    def num_rows(self) -> int:
        return len(self._offsets)

    @property
    def running(self) -> bool:
        """Whether the last process recorded its start and not its end."""
        return self.started is not None and self.stopped is None

    @property
    def finished(self) -> bool:
        return self.counts.rows == self.num_rows

    @property
    def failed_rows(self) -> list[int]:
        """Rows with an error that another run may answer; cut rows are continued instead."""
        return sorted(row for row in self._failed if row not in self._cut)

    def failures(self) -> dict[str, list[tuple[int, int]]]:
        """By code, the most frequent first: failed rows in their order, and where their records begin."""
        found: dict[str, list[tuple[int, int]]] = {}
        for row, code in sorted(self._failed.items()):
            found.setdefault(code, []).append((row, self._offsets[row]))
        return dict(sorted(found.items(), key=lambda each: -len(each[1])))

    @property
    def num_continued(self) -> int:
        """Answers of cut rows that were replaced by their continuation."""
        return self._num_continued

    def cut_rows(self, max_tokens: int) -> list[int]:
        """Cut rows that have a cut choice with fewer than `max_tokens` tokens."""
        return sorted(row for row, cut in self._cut.tokens() if cut < max_tokens)

    @property
    def longest_cut(self) -> int:
        """The most tokens after which a row was cut; 0 for none."""
        return max((cut for _, cut in self._cut.tokens()), default=0)

    def cut_offset(self, row: int) -> int | None:
        """Where the record of a cut row begins; None for every other row."""
        return self._offsets[row] if row in self._cut else None

    def pending(self) -> Iterator[int]:
        """Rows without an answer, in the order of the input."""
        return (row for row, offset in enumerate(self._offsets) if not offset)

    def answered(self) -> Iterator[tuple[int, int]]:
        """(row, where its record begins) of every row that has an answer or an error, in the order of the input."""
        return ((row, offset) for row, offset in enumerate(self._offsets) if offset)

    def apply(self, offset: int, payload: bytes) -> None:
        """Raises BadJournal for a record that cannot follow those before it."""
        if (done := decode_done(payload, with_line=False)) is not None:
            self.done(offset, done)
            return
        record = json.loads(payload)
        kind = record.get("kind")
        if (kind == Kind.OPEN) is bool(self.opened):
            raise BadJournal(f"the journal has a record of kind {kind!r} at byte {offset}, where none is allowed")
        if kind == Kind.OPEN:
            self._open(record)
        elif kind == Kind.START:
            self._start(record)
        elif kind == Kind.BEGIN:
            self._started.update(record["rows"])
        elif kind == Kind.STOP:
            self.stopped = record
            self._started.clear()
        elif kind == Kind.RETRY:
            self._retry(record["rows"])
        elif kind == Kind.EXPORT:
            self.exported, self.export_is_current = record, True
        elif kind == Kind.CANCEL:
            self.cancelled = record
        elif kind == Kind.EXTEND:
            self._extend(record)
        else:
            raise OtherVersion(
                f"the journal was written by a newer moedge: this one knows no record of kind {kind!r}. {_NEWER_ADVICE}"
            )

    def _open(self, record: Mapping[str, Any]) -> None:
        refuse_version(record)
        self.opened = record
        if (identity := record.get("identity", {})).get("compute") == "auto":
            # Journals from before there was "float".
            self.opened = {**record, "identity": {**identity, "compute": "float"}}
        self._offsets = array("Q", bytes(8 * record["num_rows"]))

    def _start(self, record: Mapping[str, Any]) -> None:
        """A process that begins learns here how the last one ended, and whom to suspect for it."""
        ending = Ending(record["ending"])
        if ending is Ending.CRASH:
            for row in self._started:
                self.suspects.setdefault(row, Suspicion()).count()
        self._started.clear()
        self.started, self.stopped, self.cancelled = record, None, None
        self.key_offsets = record.get("key_offsets") or self.key_offsets

    def done(self, offset: int, done: Done) -> None:
        """Applies the record of an answer."""
        if done.row >= len(self._offsets) or (self._offsets[done.row] and done.row not in self._cut):
            raise BadJournal(f"row {done.row} has a second answer at byte {offset} of the journal")
        self._forget_cut(done.row)
        self._offsets[done.row] = offset
        self.export_is_current = False
        if done.failed:
            self._failed[done.row] = sys.intern(next(iter(done.outcome), ""))
        if done.cut:
            self._cut.put(done)
        self.counts.add(done)
        self._started.discard(done.row)
        self.suspects.pop(done.row, None)

    def _retry(self, rows: list[int]) -> None:
        """Rows that failed are open again; their tokens were spent all the same."""
        for row in rows:
            if row not in self._failed:
                raise BadJournal(f"row {row} is retried although it has not failed")
            self._offsets[row] = 0
            self.counts.codes[self._failed.pop(row)] -= 1
        self.counts.codes += Counter()
        self.counts.failed -= len(rows)

    def _forget_cut(self, row: int) -> None:
        """Its answer is replaced by the continued one."""
        if (before := self._cut.pop(row)) is not None:
            self.counts.add(before, times=-1)
            self._failed.pop(row, None)
            self._num_continued += 1

    def _extend(self, record: Mapping[str, Any]) -> None:
        """The input has grown at its end: from here on it is the one that the record describes."""
        more = record["num_rows"] - len(self._offsets)
        if more < 0:
            raise BadJournal(f"the input shrinks to {record['num_rows']} rows in the journal")
        self._offsets.extend(array("Q", bytes(8 * more)))
        self.opened = {**self.opened, **{name: record[name] for name in ("num_rows", "input", "endpoints")}}
