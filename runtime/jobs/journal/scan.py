"""Reads a journal from its start: the records that can be trusted, and what is wrong with the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from .record import printed_crc, unframe

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
    """What follows `line`: JSON or None, and length. Each line is held against the CRC32 its predecessor gives."""
    while following := file.readline():
        previous = printed_crc(line)
        yield None if previous is None else unframe(following, previous), len(following)
        line = following
