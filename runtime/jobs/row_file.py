"""Any row of a plain input file, at once: where each begins, and whether it is still what it was.

24 bytes per row. Knows no JSON.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from io import BufferedReader

from .lines import MAX_LINE_NBYTES, Line, read_lines
from .reader import LineParser
from .refusals import InputChanged
from .rows import Defaults, Row

_MARK = b"\xef\xbb\xbf"


class RowFile:
    """A seekable file without a gzip layer, read once for the places of its rows, then at any of them."""

    def __init__(self, file: BufferedReader, defaults: Defaults) -> None:
        self._file = file
        self._parser = LineParser(defaults)
        self._offsets = array("Q")
        self._lines = array("Q")
        self._digests = array("Q")
        self._scan()

    def __len__(self) -> int:
        return len(self._offsets)

    def digest(self, row: int) -> str:
        """16 hex digits that identify the row's line."""
        return f"{self._digests[row]:016x}"

    def line_number(self, row: int) -> int:
        return self._lines[row]

    def row(self, index: int) -> Row:
        """A row without a fault. Raises InputChanged where its line is not what it was when the file was first read."""
        self._file.seek(self._offsets[index])
        content = self._file.readline(MAX_LINE_NBYTES + 2).removesuffix(b"\n").removesuffix(b"\r")
        if _digest(content) != self._digests[index]:
            raise InputChanged(
                f"line {self._lines[index]} of the input was changed while the job ran; put the file back as it was, "
                "then start the same command again"
            )
        return self._parser.again(Line(self._lines[index], self._offsets[index], content), index)

    def _scan(self) -> None:
        self._file.seek(0)
        begin = len(_MARK) if self._file.peek(len(_MARK)).startswith(_MARK) else 0
        self._file.seek(begin)
        for line in read_lines(self._file, MAX_LINE_NBYTES):
            self._offsets.append(begin + line.offset)
            self._lines.append(line.number)
            self._digests.append(0 if line.content is None else _digest(line.content))


def _digest(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest())
