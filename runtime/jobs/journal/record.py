"""One record of a journal: a line of ASCII JSON behind a CRC32 that also covers the record before it.

`0a1b2c3d {"kind":"begin","synced":4096,"rows":[7,8]}`. Because of the chain a record that was dropped or moved is
noticed as well as a damaged one. `synced` says up to which byte the journal was known to be on disk when the record was
written: damage before that is corruption, damage after it the torn tail of a crash.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO

VERSION = 1
# What precedes a record's JSON: eight hex digits and a blank.
HEAD_NBYTES = 9
_DONE = re.compile(
    rb'\{"kind":"done","synced":\d+,"row":(\d+),"failed":(true|false),"tokens":\[(\d+),(\d+)\],'
    rb'"input":"([0-9a-f]{16})","answer":'
)


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


@dataclass(frozen=True, slots=True)
class Done:
    """One row's answer: `line` is what the output file gets, `input` the digest of the row's line."""

    row: int
    failed: bool
    prompt_tokens: int
    generated_tokens: int
    input: str
    line: str


def encode(kind: Kind, synced: int, content: Mapping[str, Any]) -> bytes:
    """A record's JSON. Raises ValueError for NaN and infinities."""
    fields = {"kind": kind, "synced": synced, **content}
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii")


def encode_done(done: Done, synced: int) -> bytes:
    """Like `encode`, for an answer that is already encoded: its bytes are copied, not parsed."""
    failed = "true" if done.failed else "false"
    return (
        f'{{"kind":"done","synced":{synced},"row":{done.row},"failed":{failed},'
        f'"tokens":[{done.prompt_tokens},{done.generated_tokens}],"input":"{done.input}","answer":{done.line}}}'
    ).encode("ascii")


def decode_done(payload: bytes, with_line: bool = True) -> Done | None:
    """The answer in a record's JSON, its line empty where it is not wanted; None for a record of another kind."""
    match = _DONE.match(payload)
    if match is None:
        return None
    row, failed, prompt, generated, digest = match.groups()
    line = payload[match.end() : -1].decode("ascii") if with_line else ""
    return Done(int(row), failed == b"true", int(prompt), int(generated), digest.decode(), line)


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
