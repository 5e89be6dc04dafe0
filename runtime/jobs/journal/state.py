"""The records of a journal, and the state that they add up to: answered rows with their offsets, and suspect rows.

A record is a line of ASCII JSON behind a CRC32 that also covers the record before it:
`0a1b2c3d {"kind":"begin","synced":4096,"rows":[7,8]}`. Because of the chain a record that was dropped or moved is
noticed as well as a damaged one. `synced` says up to which byte the journal was known to be on disk when the record was
written: damage before that is corruption, damage after it the torn tail of a crash.

The state applies records one by one, read or just written: both ways give the same.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from ...settings.errors import BadJournal, OtherVersion

# Version 4 keeps what rows in work have generated, 3 counts cached and reasoning tokens in an answer's record; 2, which
# does neither, is read too.
VERSION, OLDEST_READ = 4, 2
# The reason in the stop record of a job whose every row has its answer.
FINISHED = "finished"
# What precedes a record's JSON: eight hex digits and a blank.
HEAD_NBYTES = 9
_DONE = re.compile(
    rb'\{"kind":"done","synced":\d+,"row":(\d+),"failed":(true|false),"tokens":\[(\d+),(\d+)(?:,(\d+),(\d+))?\],'
    rb'"input":"([0-9a-f]{16})","outcome":(\{[a-z0-9_":,]*\}),"cut":(\d+),"nbytes":(\d+),"answer":'
)
_CHOICES = b',"choices":'


class Kind(StrEnum):
    """`open` is the first record; `start` and `stop` frame each process that worked on the job."""

    OPEN = "open"
    START = "start"
    BEGIN = "begin"
    PROGRESS = "progress"
    DONE = "done"
    STOP = "stop"
    RETRY = "retry"
    EXPORT = "export"
    CANCEL = "cancel"
    EXTEND = "extend"


@dataclass(frozen=True, slots=True)
class CutChoice:
    """What one choice of a row generated so far: enough to continue it as if it had never been cut or stopped.

    `logprobs` is [token id, logprob, rank, [[token id, logprob], ...]] for each token, where the row asks for them, and
    `prompt_logprobs` the same for the tokens of its prompt.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[Any] = ()
    prompt_logprobs: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """One row's answer: `line` is what the output file gets, `input` the digest of the row's line.

    `outcome` counts the finish reasons of an answer's choices; of an error it is the code, once. `cut` is the number of
    tokens of the shortest choice that max_tokens ended, 0 for none. `choices` are those of a cut row, all of them; they
    are empty for every other row, and in a record that was read without its line. `cached_tokens` of the prompt were
    found in the prefix cache, and `reasoning_tokens` of the generated ones came before the answer: as this run had it.
    """

    row: int
    failed: bool
    prompt_tokens: int
    generated_tokens: int
    input: str
    line: str
    outcome: Mapping[str, int] = field(default_factory=dict)
    cut: int = 0
    choices: tuple[CutChoice, ...] = ()
    cached_tokens: int = 0
    reasoning_tokens: int = 0


def encode(kind: Kind, synced: int, content: Mapping[str, Any]) -> bytes:
    """A record's JSON. Raises ValueError for NaN and infinities."""
    fields = {"kind": kind, "synced": synced, **content}
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii")


def encode_done(done: Done, synced: int) -> bytes:
    """Like `encode`, for an answer that is already encoded: its bytes are copied, not parsed."""
    failed, outcome = "true" if done.failed else "false", json.dumps(dict(done.outcome), separators=(",", ":"))
    details = f",{done.cached_tokens},{done.reasoning_tokens}" if done.cached_tokens or done.reasoning_tokens else ""
    return (
        f'{{"kind":"done","synced":{synced},"row":{done.row},"failed":{failed},'
        f'"tokens":[{done.prompt_tokens},{done.generated_tokens}{details}],"input":"{done.input}","outcome":{outcome},'
        f'"cut":{done.cut},"nbytes":{len(done.line)},"answer":{done.line}{_encode_choices(done.choices)}}}'
    ).encode("ascii")


def encode_progress(row: int, choices: Sequence[CutChoice], synced: int) -> bytes:
    """What each choice of a row in work has generated since the row's last record of the kind."""
    return f'{{"kind":"progress","synced":{synced},"row":{row}{_encode_choices(choices)}}}'.encode("ascii")


def _encode_choices(choices: Sequence[CutChoice]) -> str:
    if not choices:
        return ""
    found = [
        {"token_ids": list(each.token_ids), "logprobs": list(each.logprobs)}
        | ({"prompt_logprobs": list(each.prompt_logprobs)} if each.prompt_logprobs else {})
        for each in choices
    ]
    # Not JSON by the letter: the logprob of an impossible token is -Infinity.
    return f"{_CHOICES.decode()}{json.dumps(found, separators=(',', ':'))}"


def decode_done(payload: bytes, with_line: bool = True) -> Done | None:
    """The answer in a record's JSON, its line empty where it is not wanted; None for a record of another kind."""
    match = _DONE.match(payload)
    if match is None:
        return None
    row, failed, prompt, generated, cached, reasoning, digest, outcome, cut, nbytes = match.groups()
    line, choices = "", tuple[CutChoice, ...]()
    if with_line:
        end = match.end() + int(nbytes)
        rest = payload[end + len(_CHOICES) : -1]
        line, choices = payload[match.end() : end].decode("ascii"), _choices(json.loads(rest) if rest else ())
    return Done(
        int(row),
        failed == b"true",
        int(prompt),
        int(generated),
        digest.decode(),
        line,
        _outcome(outcome),
        int(cut),
        choices,
        int(cached or 0),
        int(reasoning or 0),
    )


def decode_progress(payload: bytes) -> tuple[CutChoice, ...]:
    """The choices in a record of progress."""
    return _choices(json.loads(payload)["choices"])


def _choices(found: Sequence[Mapping[str, Any]]) -> tuple[CutChoice, ...]:
    return tuple(CutChoice(each["token_ids"], each["logprobs"], each.get("prompt_logprobs", ())) for each in found)


@lru_cache(maxsize=256)
def _outcome(text: bytes) -> Mapping[str, int]:
    """Shared between records: most rows of a job have the same one."""
    return MappingProxyType(json.loads(text))


def frame(payload: bytes, previous: int) -> bytes:
    """The record's line in the file."""
    return b"%08x %b\n" % (zlib.crc32(payload, previous), payload)


def printed_crc(line: bytes) -> int | None:
    """The CRC32 that a line states for itself; None without one."""
    head = line[:HEAD_NBYTES]
    if len(head) < HEAD_NBYTES or head[-1:] != b" ":
        return None
    try:
        return int(head[:-1], 16) if head[:-1].isalnum() else None
    except ValueError:
        return None


def unframe(line: bytes, previous: int) -> bytes | None:
    """The JSON of a whole, undamaged line whose predecessor has the CRC32 `previous`; else None."""
    crc = printed_crc(line)
    if crc is None or not line.endswith(b"\n"):
        return None
    payload = line[HEAD_NBYTES:-1]
    return payload if zlib.crc32(payload, previous) == crc else None


_SYNCED = re.compile(rb'\{"kind":"[a-z]+","synced":(\d+)')


class JournalScan:
    """Iterate it once for the sound records; then `end`, `crc` and `corrupt` are known.

    `end` is the byte after the last sound record and `crc` that record's CRC32. What follows is a torn tail, unless
    `corrupt`: then some of it had been on disk for certain, so it was damaged there.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.end = 0
        self.crc = 0
        self.nbytes = 0
        self.corrupt = False

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Where each record's line begins, and its JSON."""
        self._file.seek(0)
        while line := self._file.readline():
            payload = unframe(line, self.crc)
            if payload is None:
                self._judge(line)
                return
            yield self.end, payload
            self.end += len(line)
            self.crc = printed_crc(line) or 0
        self.nbytes = self.end

    @property
    def torn_nbytes(self) -> int:
        return self.nbytes - self.end

    def _judge(self, line: bytes) -> None:
        self.nbytes = self.end + len(line)
        for payload, nbytes in _later_records(self._file, line):
            self.nbytes += nbytes
            match = None if payload is None else _SYNCED.match(payload)
            self.corrupt |= match is not None and int(match[1]) > self.end


def salvage(file: BinaryIO) -> Iterator[bytes]:
    """The JSON of every record that is sound by itself and follows a line whose CRC32 can be read, in order."""
    file.seek(0)
    return (payload for payload, _ in _later_records(file, b"00000000 \n") if payload is not None)


def _later_records(file: BinaryIO, line: bytes) -> Iterator[tuple[bytes | None, int]]:
    """The next line: its JSON or None, and its length. Checks each line against the CRC32 in its predecessor."""
    while following := file.readline():
        previous = printed_crc(line)
        yield None if previous is None else unframe(following, previous), len(following)
        line = following


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
class Unfinished:
    """What a row without an answer has generated: where its records of progress begin, and the tokens in them."""

    offsets: list[int] = field(default_factory=list)
    tokens: int = 0


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
    for offset, payload in scan:
        state.apply(offset, payload)
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
        self.unfinished: dict[int, Unfinished] = {}
        self._started: set[int] = set()
        self._offsets = array("Q")
        # Codes are shared strings.
        self._failed: dict[int, str] = {}
        self._cut = _Counted()
        # Answers of cut rows that were replaced by their continuation.
        self.num_continued = 0

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
        match kind:
            case Kind.OPEN:
                self._open(record)
            case Kind.START:
                self._start(record)
            case Kind.BEGIN:
                self._started.update(record["rows"])
            case Kind.PROGRESS:
                self.progress(offset, record["row"], sum(len(each["token_ids"]) for each in record["choices"]))
            case Kind.STOP:
                self.stopped = record
                self._started.clear()
            case Kind.RETRY:
                self._retry(record["rows"])
            case Kind.EXPORT:
                self.exported, self.export_is_current = record, True
            case Kind.CANCEL:
                self.cancelled = record
            case Kind.EXTEND:
                self._extend(record)
            case _:
                raise OtherVersion(
                    f"the journal was written by a newer moedge: this one knows no record of kind {kind!r}. "
                    f"{_NEWER_ADVICE}"
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

    def progress(self, offset: int, row: int, tokens: int) -> None:
        """Applies a record of what a row in work has generated."""
        if row >= len(self._offsets) or (self._offsets[row] and row not in self._cut):
            raise BadJournal(f"row {row} has its answer and goes on at byte {offset} of the journal")
        unfinished = self.unfinished.setdefault(row, Unfinished())
        unfinished.offsets.append(offset)
        unfinished.tokens += tokens

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
        self.unfinished.pop(done.row, None)

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
            self.num_continued += 1

    def _extend(self, record: Mapping[str, Any]) -> None:
        """The input has grown at its end: from here on it is the one that the record describes."""
        more = record["num_rows"] - len(self._offsets)
        if more < 0:
            raise BadJournal(f"the input shrinks to {record['num_rows']} rows in the journal")
        self._offsets.extend(array("Q", bytes(8 * more)))
        self.opened = {**self.opened, **{name: record[name] for name in ("num_rows", "input", "endpoints")}}
