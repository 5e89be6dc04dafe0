"""Any row of a plain input file, at once, and only if it is still what it was. Knows no JSON."""

from __future__ import annotations

from io import BufferedReader

from .reader import LineParser
from .refusals import InputChanged
from .row_places import RowPlaces
from .rows import Defaults, Row


class RowFile:
    """A seekable file that stands where its text begins, and whose rows were found at `places`."""

    def __init__(self, file: BufferedReader, places: RowPlaces, defaults: Defaults) -> None:
        self._file = file
        self._places = places
        self._parser = LineParser(defaults)
        self._begin = file.tell()

    def row(self, index: int) -> Row:
        """A row without a fault. Raises InputChanged where its line is not what it was when the file was first read."""
        offset, nbytes = self._places.span(index)
        self._file.seek(self._begin + offset)
        content = self._file.read(nbytes)
        number = self._places.line_number(index)
        if not self._places.is_at(index, content):
            raise InputChanged(
                f"line {number} of the input was changed while the job ran; put the file back as it was, "
                "then start the same command again"
            )
        return self._parser.again(content, index, number)
