"""An input file or standard input as one stream of plain bytes. Knows gzip, zstd and encodings, no lines, no rows."""

from __future__ import annotations

import gzip
import os
import sys
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from ..settings.errors import InputUnreadable, MissingExtra
from .failure import ErrorCode, InvalidRow

STDIN = "-"
Stream = BufferedReader | gzip.GzipFile
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def open_input(path: str | os.PathLike[str]) -> BufferedReader:
    """The raw bytes of `path`, or of standard input for "-"."""
    if os.fspath(path) == STDIN:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InputUnreadable(f"{path} cannot be read: {error.strerror}; give a file of rows") from None


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Like `open_input`, for readers that read twice: a pipe would be empty, or hang, the second time."""
    if os.fspath(path) == STDIN or (Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir())):
        raise InputUnreadable(f"{path} is a stream, but a job reads its input more than once; save it to a file first")
    return open_input(path)


class DamagedZstd(Exception):
    """The compressed data is damaged, cut off, or needs more memory than any compressor uses by default."""


# What zstd's own program accepts; a frame may ask for 2 GiB.
_MAX_WINDOW_NBYTES = 1 << 27
# What is unpacked at once: a block of 4 bytes may unpack to 128 KiB.
_ZSTD_PIECE_NBYTES = 512


class ZstdReader(RawIOBase):
    """The frames of a zstd file, unpacked in pieces of bounded size."""

    def __init__(self, raw: BufferedReader) -> None:
        """Raises MissingExtra."""
        try:
            import zstandard
        except ImportError:
            raise MissingExtra("zstd needs zstandard", "zst", "; or unpack the file first") from None
        self._raw = raw
        self._zstd = zstandard
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input and not (self._refilled()):
                return 0
            self._unpack()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _refilled(self) -> bool:
        self._input = self._raw.read(_ZSTD_PIECE_NBYTES)
        if not self._input and self._frame is not None:
            raise DamagedZstd("it ends within a frame")
        return bool(self._input)

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = self._zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW_NBYTES).decompressobj()
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._zstd.ZstdError as error:
            raise DamagedZstd(str(error)) from None
        self._input = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None


def packed(raw: BufferedReader) -> bool:
    """Whether gzip or zstd is around the file."""
    return raw.peek(4)[:4].startswith((_GZIP_MAGIC, _ZSTD_MAGIC))


def _layer(raw: BufferedReader) -> Stream:
    head = raw.peek(4)[:4]
    if head.startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=raw)
    return BufferedReader(ZstdReader(raw)) if head == _ZSTD_MAGIC else raw


def plain(raw: BufferedReader) -> Stream:
    """`raw` without gzip or zstd around it and without its byte order mark; both are recognized by their first bytes.

    Raises `InvalidRow` for UTF-16 and UTF-32: JSON text starts with two ASCII characters, so that a NUL among
    the first four bytes tells them without a mark as well (RFC 4627, section 3).
    """
    stream = _layer(raw)
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
