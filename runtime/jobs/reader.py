"""A file of rows, streamed: every line that is not blank becomes a `Row` or a `BadRow`, never an exception.

Knows which form a line is in; what the forms mean is in openai_rows.py and short_rows.py.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from io import BufferedReader
from typing import Any

from .building import Place, RowBuilder
from .codes import ErrorCode, RowFault
from .ids import UniqueIds, line_id
from .lines import MAX_LINE_NBYTES, Line, read_lines
from .openai_rows import is_openai, openai_body, openai_id
from .response_format import Schemas
from .row_places import RowPlaces
from .rows import BadRow, Defaults, Endpoint, Row, RowError
from .short_rows import is_short, short_body, short_id
from .source import open_input, plain
from .strict_json import parse_again, parse_object

_GZIP_DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error)


def read_rows(path: str | os.PathLike[str], defaults: Defaults) -> Iterator[Row | BadRow]:
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
    places: RowPlaces | None = None,
) -> Iterator[Row | BadRow]:
    """As `read_rows`; a file that is wrong as a whole ends with one `BadRow` whose line is 0.

    `places` takes note of where each row was.
    """
    parser = LineParser(defaults, max_line_nbytes)
    try:
        for line in read_lines(plain(raw), max_line_nbytes):
            if places is not None:
                places.add(line)
            yield parser.parse(line)
    except _GZIP_DAMAGE as error:
        yield parser.end_badly(
            RowFault(ErrorCode.DAMAGED_GZIP, f"the gzip data is damaged or cut off ({error}); copy the file again")
        )
    except RowFault as fault:
        yield parser.end_badly(fault)


class LineParser:
    """Lines of one file to rows; `parse` takes them in their order, `again` any that was parsed without a fault."""

    def __init__(self, defaults: Defaults, max_line_nbytes: int = MAX_LINE_NBYTES) -> None:
        self._builder = RowBuilder(defaults)
        self._max_line_nbytes = max_line_nbytes
        self._ids = UniqueIds()
        self._schemas = Schemas()
        self._num_rows = 0
        # An unreadable line is answered in the form of the line before it.
        self._short = False

    def parse(self, line: Line) -> Row | BadRow:
        index, row_id = self._num_rows, line_id(line.number)
        self._num_rows += 1
        try:
            values = self._object(line)
            row_id = self._id(values, line.number)
            self._ids.add(row_id, line.number, "id" if self._short else "custom_id")
            row = self._row(values, Place(index, line.number, row_id))
            if row.schema is not None:
                self._schemas.check(row.schema)
            return row
        except RowFault as fault:
            return self._bad(Place(index, line.number, row_id), fault)

    def again(self, content: bytes, index: int, number: int) -> Row:
        """The row of line `number`; neither JSON nor id nor schema is looked at twice."""
        values = parse_again(content)
        return self._row(values, Place(index, number, self._id(values, number)))

    def end_badly(self, fault: RowFault) -> BadRow:
        return self._bad(Place(self._num_rows, 0, line_id(0)), fault)

    def _row(self, values: dict[str, Any], place: Place) -> Row:
        endpoint, body = (Endpoint.SHORT, short_body(values)) if self._short else openai_body(values)
        return self._builder.build(body, endpoint, place)

    def _object(self, line: Line) -> dict[str, Any]:
        if line.content is None:
            raise RowFault(
                ErrorCode.LINE_TOO_LONG, f"longer than {self._max_line_nbytes} bytes; split the prompt into rows"
            )
        return parse_object(line.content)

    def _id(self, values: dict[str, Any], number: int) -> str:
        if is_openai(values):
            self._short = False
            return openai_id(values, number)
        if is_short(values):
            self._short = True
            return short_id(values, number)
        raise RowFault(
            ErrorCode.NOT_A_ROW,
            "an object with neither custom_id, method, url and body nor prompt or messages; see docs/rows.md",
        )

    def _bad(self, place: Place, fault: RowFault) -> BadRow:
        error = RowError(fault.code, fault.message, fault.param, place.line)
        return BadRow(place.index, place.line, place.id, self._short, error)
