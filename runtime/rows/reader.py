"""A file of rows, streamed: every line that is not blank becomes a `Row` or a `RowFailure`, never an exception.

Knows which form a line is in; what the forms mean is in row_formats.py.
"""

from __future__ import annotations

import gzip
import os
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from io import BufferedReader
from typing import Any, NamedTuple

from ..settings.errors import InputChanged
from .columns import Columns
from .failure import ErrorCode, InvalidRow, RowFailure
from .fields import Schemas
from .input_file import DamagedZstd, Stream, open_input, plain
from .row import Defaults, Endpoint, Row
from .row_formats import (
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
from .strict_json import parse_again, parse_object

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
            if row.schema is not None:
                self._schemas.check(row.schema)
            return row
        except InvalidRow as error:
            return self._located(error.failure, position)

    def again(self, content: bytes, index: int, number: int) -> Row:
        """The row of line `number`; neither JSON nor id nor schema is looked at twice."""
        values = parse_again(content)
        return self._row(values, self._position(values, RowPosition(index, number, line_id(number))))

    def first_time(self, content: bytes, index: int, number: int) -> Row | RowFailure:
        """The same for a row that `parse` never had; its id is not compared with those of others."""
        try:
            return self.again(content, index, number)
        except InvalidRow as error:
            return self._located(error.failure, RowPosition(index, number, line_id(number)))

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
        return self._parser.again(self._content(index), index, self.index.line_number(index))

    def new_row(self, index: int) -> Row | RowFailure:
        """A row that was added to the file, and to the index, since the file was first read. Raises InputChanged."""
        return self._parser.first_time(self._content(index), index, self.index.line_number(index))

    def _content(self, index: int) -> bytes:
        offset, nbytes = self.index.span(index)
        self._file.seek(self._begin + offset)
        content = self._file.read(nbytes)
        number = self.index.line_number(index)
        if not self.index.is_at(index, content):
            raise InputChanged(
                f"line {number} of the input was changed while the job ran; restore the file, "
                "then run the same command again"
            )
        return content
