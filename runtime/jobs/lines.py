"""A stream of bytes as lines of bounded size. Splits on newline bytes alone: U+2028 and form feeds stay text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .source import Stream

MAX_LINE_NBYTES = 16 << 20


class Line(NamedTuple):
    """`offset` counts bytes from where reading began; `content` has no line end, None is a line over the limit."""

    number: int
    offset: int
    content: bytes | None


def read_lines(stream: Stream, max_nbytes: int = MAX_LINE_NBYTES) -> Iterator[Line]:
    """Yields the lines that are not blank, numbered from 1; holds at most one of them."""
    number = offset = 0
    # Two bytes more than the limit: room for CRLF after a line of exactly the limit.
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
