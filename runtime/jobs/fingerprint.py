"""What identifies an input file, taken while the file is read once for something else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from io import RawIOBase
from typing import Any, BinaryIO

_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`sha256` (hex) and `nbytes` are of the file as stored; a touched file differs in `mtime_ns` alone."""

    nbytes: int
    sha256: str
    mtime_ns: int

    def same_content(self, other: Fingerprint) -> bool:
        return (self.nbytes, self.sha256) == (other.nbytes, other.sha256)


class HashingReader(RawIOBase):
    """Passes a file's bytes on and hashes them on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = sha256()
        self._opened = os.fstat(file.fileno())
        self._nbytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._sha256.update(data)
        self._nbytes += len(data)
        return len(data)

    def fingerprint(self) -> Fingerprint:
        """Reads what is left first."""
        while self.read(_CHUNK_NBYTES):
            pass
        return Fingerprint(self._nbytes, self._sha256.hexdigest(), self._opened.st_mtime_ns)

    def changed(self) -> bool:
        """Whether the file was written to since it was opened here."""
        now = os.fstat(self._file.fileno())
        return (now.st_size, now.st_mtime_ns) != (self._nbytes, self._opened.st_mtime_ns)
