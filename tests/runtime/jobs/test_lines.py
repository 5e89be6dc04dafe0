"""Cases I7 and I8 of the failure table: where lines end, and how long they may be (`runtime/rows/reader.py`)."""

import io
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.rows.reader import Line, read_lines

LIMIT = 8
contents = st.binary(max_size=2 * LIMIT).map(lambda line: line.replace(b"\n", b"").rstrip(b"\r"))


def lines_of(data: bytes) -> list[Line]:
    return list(read_lines(io.BufferedReader(io.BytesIO(data)), LIMIT))  # type: ignore[arg-type]


@given(st.lists(contents), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_every_line_that_is_not_blank_comes_once_with_its_number(lines: list[bytes], end: bytes, ended: bool) -> None:
    expected = [
        (number, line if len(line) <= LIMIT else None)
        for number, line in enumerate(lines, 1)
        if len(line) > LIMIT or line.strip(b" \t\r")
    ]
    data = end.join(lines) + (end if ended else b"")
    found = lines_of(data)
    assert [(line.number, line.content) for line in found] == expected
    for line in found:
        assert data[line.offset :].startswith(lines[line.number - 1])
        assert data[: line.offset].count(b"\n") == line.number - 1


def test_i7_only_newlines_split() -> None:
    text = "a\u2028b".encode(), "a\u0085b".encode(), b"a\fb\vc\x1dd", b"a\rb"
    assert [line.content for line in lines_of(b"\n".join(text))] == list(text)


def test_i8_a_line_over_the_limit_costs_its_own_place_only() -> None:
    assert lines_of(b"a\n" + b"x" * 3_000_000 + b"\nb") == [
        (1, 0, b"a"),
        (2, 2, None),
        (3, 3_000_003, b"b"),
    ]


def test_i8_the_limit_itself_fits_with_either_line_end() -> None:
    exact, over = b"x" * LIMIT, b"x" * (LIMIT + 1)
    data = b"\r\n".join([exact, over, exact]) + b"\n" + over + b"\n" + exact
    assert [line.content for line in lines_of(data)] == [exact, None, exact, None, exact]


class Endless(io.RawIOBase):
    """`nbytes` of one letter, and no newline."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self.left)
        buffer[:count] = b"x" * count
        self.left -= count
        return count


def test_i8_a_line_without_end_takes_no_more_memory_than_twice_the_limit() -> None:
    limit = 4 << 20
    stream = io.BufferedReader(Endless(256 << 20), 1 << 16)
    tracemalloc.start()
    lines = list(read_lines(stream, limit))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == [(1, 0, None)]
    assert peak < 2 * limit + (1 << 20)
