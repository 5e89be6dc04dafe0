"""Where each row of a file is, and what identifies its line: noted while the file is read. 28 bytes a row."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from .lines import Line


class RowPlaces:
    """Rows count from 0, lines from 1; offsets are those of the text, behind its byte order mark."""

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
        """Whether `content` is what the row's line was."""
        return _digest(content) == self._digests[row]


def _digest(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest())
