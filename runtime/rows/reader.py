"""A file of rows, or standard input, streamed: every line that is not blank becomes a `Row` or a `RowFailure`, never an
exception.

Reads gzip, zstd and several encodings. Knows which form a line is in; what the forms mean is in row_formats.py.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..settings.errors import InputChanged, InputUnreadable, MissingExtra
from .fields import Schemas
from .row import Defaults, Endpoint, ErrorCode, InvalidRow, Row, RowFailure, parse_object
from .row_formats import (
    Columns,
    RowBuilder,
    RowPosition,
    UniqueIds,
    is_batch_line,
    is_openai,
    is_short,
    line_id,
    openai_body,
    openai_id,
    openai_own,
    short_body,
    short_id,
    what_is_missing,
)

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


MAX_LINE_NBYTES = 16 << 20


class Line(NamedTuple):
    """`offset` counts bytes from where reading began; `content` has no line end, None is a line over the limit."""

    number: int
    offset: int
    content: bytes | None


def read_lines(stream: Stream, max_nbytes: int = MAX_LINE_NBYTES) -> Iterator[Line]:
    """Yields the lines that are not blank, numbered from 1; holds at most one of them."""
    number = offset = 0
    # Two bytes more than the limit, for the CRLF after a line of exactly the limit.
    while piece := stream.readline(max_nbytes + 2):
        number += 1
        nbytes = len(piece)
        content = piece.removesuffix(b"\n").removesuffix(b"\r")
        if len(content) > max_nbytes:
            nbytes += _skip_to_end(stream, piece)
            yield Line(number, offset, None)
        elif content.strip(b" \t\r"):
            yield Line(number, offset, content)
        offset += nbytes


def _skip_to_end(stream: Stream, piece: bytes) -> int:
    """How many bytes were skipped."""
    nbytes = 0
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(1 << 20)
        nbytes += len(piece)
    return nbytes


class RowIndex:
    """The offset, line number and digest of each row of a file: 28 bytes per row.

    Rows count from 0, lines from 1; offsets are those of the text, behind its byte order mark.
    """

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._nbytes = array("I")
        self._lines = array("Q")
        self._digests = array("Q")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, line: Line) -> None:
        """The next row; a line over the limit has no content, and digest 0."""
        content = line.content or b""
        self._offsets.append(line.offset)
        self._nbytes.append(len(content))
        self._lines.append(line.number)
        self._digests.append(_digest(content) if content else 0)

    def line_number(self, row: int) -> int:
        return self._lines[row]

    def span(self, row: int) -> tuple[int, int]:
        """Offset and length of the row's line, in bytes, without its end."""
        return self._offsets[row], self._nbytes[row]

    def digest(self, row: int) -> str:
        """16 hex digits that identify the row's line."""
        return f"{self._digests[row]:016x}"

    def is_at(self, row: int, content: bytes) -> bool:
        """Whether `content` equals the recorded line of the row."""
        return _digest(content) == self._digests[row]


def _digest(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest())


_GZIP_DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error)


def read_rows(path: str | os.PathLike[str], defaults: Defaults) -> Iterator[Row | RowFailure]:
    """Rows of a .jsonl or .jsonl.gz file, or of standard input for "-".

    Holds one line and a digest per id. Raises `InputUnreadable` if there is no such file, MissingExtra if a row asks
    for JSON and nothing is installed that could hold it to that.
    """
    with open_input(path) as raw:
        yield from rows_from(raw, defaults)


def rows_from(
    raw: BufferedReader,
    defaults: Defaults,
    max_line_nbytes: int = MAX_LINE_NBYTES,
    index: RowIndex | None = None,
) -> Iterator[Row | RowFailure]:
    """Like `read_rows`; an error of the whole file ends with one `RowFailure` whose line is 0.

    `index` notes where each row was.
    """
    parser = LineParser(defaults, max_line_nbytes)
    try:
        for line in read_lines(plain(raw), max_line_nbytes):
            if index is not None:
                index.add(line)
            yield parser.parse(line)
    except _GZIP_DAMAGE as error:
        yield parser.end_badly(
            RowFailure(ErrorCode.DAMAGED_GZIP, f"the gzip data is damaged or cut off ({error}); copy the file again")
        )
    except DamagedZstd as error:
        yield parser.end_badly(
            RowFailure(ErrorCode.DAMAGED_ZSTD, f"the zstd data is damaged or cut off ({error}); copy the file again")
        )
    except InvalidRow as error:
        yield parser.end_badly(error.failure)


class LineParser:
    """Lines of one file to rows; `parse` takes them in their order, `again` any that was parsed without a fault."""

    def __init__(self, defaults: Defaults, max_line_nbytes: int = MAX_LINE_NBYTES) -> None:
        self._builder = RowBuilder(defaults)
        self._columns = Columns(defaults)
        self._max_line_nbytes = max_line_nbytes
        self._ids = UniqueIds()
        self._schemas = Schemas()
        self._num_rows = 0
        # An unreadable line is answered in the form of the line before it.
        self._short = False

    def parse(self, line: Line) -> Row | RowFailure:
        position = RowPosition(self._num_rows, line.number, line_id(line.number))
        self._num_rows += 1
        try:
            if line.content is None:
                raise InvalidRow(
                    ErrorCode.LINE_TOO_LONG, f"longer than {self._max_line_nbytes} bytes; split the prompt into rows"
                )
            values = parse_object(line.content)
            position = self._position(values, position)
            self._ids.add(position.id, line.number, self._columns.id_field if self._short else "custom_id")
            row = self._row(values, position)
            return self._refusal_of_form(row) or row
        except InvalidRow as error:
            return self._located(error.failure, position)

    def _refusal_of_form(self, row: Row) -> RowFailure | None:
        """Why the form that the row asks for cannot be followed."""
        try:
            if row.schema is not None:
                self._schemas.check(row.schema)
        except InvalidRow as error:
            return row.failure(error.failure.code, error.failure.message, error.failure.param)
        return None

    def again(self, content: bytes, index: int, number: int) -> Row:
        """The row of line `number`; neither JSON nor id nor schema is looked at twice."""
        values = json.loads(content)
        return self._row(values, self._position(values, RowPosition(index, number, line_id(number))))

    def end_badly(self, failure: RowFailure) -> RowFailure:
        """The failure of the file as a whole, behind the rows that were read."""
        return self._located(failure, RowPosition(self._num_rows, 0, line_id(0)))

    def _row(self, values: dict[str, Any], position: RowPosition) -> Row:
        if self._short:
            return self._builder.build(short_body(self._columns.body(values)), Endpoint.SHORT, position)
        endpoint, body = openai_body(values)
        return self._builder.build(body, endpoint, position)

    def _position(self, values: dict[str, Any], position: RowPosition) -> RowPosition:
        """The position with the row's id, and with the user's fields; notes which form the row has."""
        number, made = position.line, self._columns.make_prompts
        if is_batch_line(values) if made else is_openai(values):
            self._short = False
            return replace(position, id=openai_id(values, number), own=openai_own(values))
        if is_short(values) or made:
            self._short = True
            self._columns.refuse_without_id(values)
            own = self._columns.own(values)
            return replace(position, id=short_id(values, number, self._columns.id_field), own=own)
        raise InvalidRow(ErrorCode.NOT_A_ROW, what_is_missing(values))

    def _located(self, failure: RowFailure, position: RowPosition) -> RowFailure:
        index, line, row_id = position.index, position.line, position.id
        return replace(failure, index=index, line=line, id=row_id, short=self._short, own=position.own)


class RowFile:
    """A seekable file, at the position where its text begins, whose rows are where `index` says."""

    def __init__(self, file: BufferedReader, index: RowIndex, defaults: Defaults) -> None:
        self._file = file
        self.index = index
        self._parser = LineParser(defaults)
        self._begin = file.tell()

    def row(self, index: int) -> Row:
        """A row without a fault. Raises InputChanged where its line is not what it was when the file was first read."""
        offset, nbytes = self.index.span(index)
        self._file.seek(self._begin + offset)
        content = self._file.read(nbytes)
        number = self.index.line_number(index)
        if not self.index.is_at(index, content):
            raise InputChanged(
                f"line {number} of the input was changed while the job ran; restore the file, "
                "then run the same command again"
            )
        return self._parser.again(content, index, number)
