"""A stream of bytes as lines of bounded size. Splits on newline bytes alone: U+2028 and form feeds stay text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .source import Stream

MAX_LINE_NBYTES = 16 << 20


class Line(NamedTuple):
    """`content` has no line end; None stands for a line over the limit, which was skipped."""

    number: int
    content: bytes | None


def read_lines(stream: Stream, max_nbytes: int = MAX_LINE_NBYTES) -> Iterator[Line]:
    """Yields the lines that are not blank, numbered from 1; holds at most one of them."""
    number = 0
    # Two bytes more than the limit: room for CRLF after a line of exactly the limit.
    while piece := stream.readline(max_nbytes + 2):
        number += 1
        content = piece.removesuffix(b"\n").removesuffix(b"\r")
        if len(content) > max_nbytes:
            _skip_to_end(stream, piece)
            yield Line(number, None)
        elif content.strip(b" \t\r"):
            yield Line(number, content)


def _skip_to_end(stream: Stream, piece: bytes) -> None:
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(1 << 20)
