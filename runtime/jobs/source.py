"""An input file or standard input as one stream of plain bytes. Knows gzip and encodings, no lines, no rows."""

from __future__ import annotations

import gzip
import os
import sys
from io import BufferedReader
from pathlib import Path

from .codes import ErrorCode, RowFault
from .refusals import InputUnreadable

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
    """As `open_input`, for readers that come back: a pipe would be empty, or hang, the second time."""
    if os.fspath(path) == STDIN or (Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir())):
        raise InputUnreadable(f"{path} is a stream, and a job reads its input more than once; save it to a file first")
    return open_input(path)


def zipped(raw: BufferedReader) -> bool:
    """Told by the first bytes, not by a name."""
    return raw.peek(2)[:2] == _GZIP_MAGIC


def plain(raw: BufferedReader) -> Stream:
    """`raw` without its gzip layer and its byte order mark; gzip is told by its first bytes, not by a name.

    Raises `RowFault` for UTF-16 and UTF-32: JSON text starts with two ASCII characters, so that a NUL among
    the first four bytes tells them without a mark as well (RFC 4627, section 3).
    """
    stream: Stream = gzip.GzipFile(fileobj=raw) if zipped(raw) else raw
    head = stream.peek(4)[:4]
    if head.startswith(_UTF16_BOMS) or b"\0" in head:
        raise RowFault(ErrorCode.UNSUPPORTED_ENCODING, "the file looks like UTF-16 or UTF-32; save it as UTF-8")
    if head.startswith(_UTF8_BOM):
        stream.read(len(_UTF8_BOM))
    return stream
