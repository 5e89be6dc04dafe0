"""One record of a journal: a line of ASCII JSON behind a CRC32 that also covers the record before it.

`0a1b2c3d {"kind":"begin","synced":4096,"rows":[7,8]}`. Because of the chain a record that was dropped or moved is
noticed as well as a damaged one. `synced` says up to which byte the journal was known to be on disk when the record was
written: damage before that is corruption, damage after it the torn tail of a crash.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, BinaryIO

# Version 3 counts cached and reasoning tokens in an answer's record; 2, which has none of them, is read too.
VERSION, OLDEST_READ = 3, 2
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
    DONE = "done"
    STOP = "stop"
    RETRY = "retry"
    EXPORT = "export"
    CANCEL = "cancel"
    EXTEND = "extend"


@dataclass(frozen=True, slots=True)
class CutChoice:
    """What one choice of a cut row generated so far: enough to continue it as if it had never been cut.

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


def _encode_choices(choices: tuple[CutChoice, ...]) -> str:
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
        line, choices = payload[match.end() : end].decode("ascii"), _decode_choices(payload[end:-1])
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


def _decode_choices(rest: bytes) -> tuple[CutChoice, ...]:
    found = json.loads(rest[len(_CHOICES) :]) if rest else ()
    return tuple(CutChoice(each["token_ids"], each["logprobs"], each.get("prompt_logprobs", ())) for each in found)


@lru_cache(maxsize=256)
def _outcome(text: bytes) -> Mapping[str, int]:
    """Shared between records: most rows of a job have the same one."""
    return MappingProxyType(json.loads(text))


def chained(payload: bytes, previous: int) -> int:
    """The CRC32 of a record whose predecessor has `previous`."""
    return zlib.crc32(payload, previous)


def frame(payload: bytes, previous: int) -> bytes:
    """The record's line in the file."""
    return b"%08x %b\n" % (chained(payload, previous), payload)


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
    return payload if chained(payload, previous) == crc else None


_SYNCED = re.compile(rb'\{"kind":"[a-z]+","synced":(\d+)')


@dataclass(frozen=True, slots=True)
class Entry:
    """A record's JSON, and where its line begins."""

    offset: int
    payload: bytes


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

    def __iter__(self) -> Iterator[Entry]:
        self._file.seek(0)
        while line := self._file.readline():
            payload = unframe(line, self.crc)
            if payload is None:
                self._judge(line)
                return
            yield Entry(self.end, payload)
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
