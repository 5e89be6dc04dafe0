"""An input file or standard input as one stream of plain bytes. Knows gzip and encodings, no lines, no rows."""

from __future__ import annotations

import gzip
import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from ..settings.errors import InputUnreadable
from .failure import ErrorCode, InvalidRow

STDIN = "-"
Stream = BufferedReader | gzip.GzipFile
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def open_input(path: str | os.PathLike[str]) -> BufferedReader:
    """The raw bytes of `path`, or of standard input for "-"."""
    if os.fspath(path) == STDIN:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InputUnreadable(f"{path} cannot be read: {error.strerror}; give a .jsonl or .jsonl.gz file") from None


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Like `open_input`, for readers that read twice: a pipe would be empty, or hang, the second time."""
    if os.fspath(path) == STDIN or (Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir())):
        raise InputUnreadable(f"{path} is a stream, but a job reads its input more than once; save it to a file first")
    return open_input(path)


def zipped(raw: BufferedReader) -> bool:
    """Whether the first bytes are those of gzip; the name does not matter."""
    return raw.peek(2)[:2] == _GZIP_MAGIC


def plain(raw: BufferedReader) -> Stream:
    """`raw` without its gzip layer and its byte order mark; gzip is recognized by its first bytes, not by a name.

    Raises `InvalidRow` for UTF-16 and UTF-32: JSON text starts with two ASCII characters, so that a NUL among
    the first four bytes tells them without a mark as well (RFC 4627, section 3).
    """
    stream: Stream = gzip.GzipFile(fileobj=raw) if zipped(raw) else raw
    head = stream.peek(4)[:4]
    if head.startswith(_UTF16_BOMS) or b"\0" in head:
        raise InvalidRow(ErrorCode.UNSUPPORTED_ENCODING, "the file looks like UTF-16 or UTF-32; save it as UTF-8")
    if head.startswith(_UTF8_BOM):
        stream.read(len(_UTF8_BOM))
    return stream


_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`sha256` (hex) and `nbytes` are of the file as stored; a touched file differs in `mtime_ns` alone."""

    nbytes: int
    sha256: str
    mtime_ns: int

    def same_content(self, other: Fingerprint) -> bool:
        return (self.nbytes, self.sha256) == (other.nbytes, other.sha256)


def prefix_digest(file: BinaryIO, nbytes: int) -> str:
    """sha256 (hex) of the first `nbytes` of a file, from where it is."""
    digest = sha256()
    while nbytes and (data := file.read(min(nbytes, _CHUNK_NBYTES))):
        digest.update(data)
        nbytes -= len(data)
    return digest.hexdigest()


class HashingReader(RawIOBase):
    """A reader that hashes the bytes of a file while it reads them."""

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
        """Whether the file was changed since it was opened."""
        now = os.fstat(self._file.fileno())
        return (now.st_size, now.st_mtime_ns) != (self._nbytes, self._opened.st_mtime_ns)
