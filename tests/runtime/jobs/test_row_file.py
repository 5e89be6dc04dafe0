"""Any row of a file at once (`runtime/rows/reader.py`) is the row that reading it from the start gives."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.job import seekable
from moedge.runtime.jobs.session import regular_input
from moedge.runtime.rows.reader import RowFile, RowIndex, rows_from
from moedge.runtime.rows.row import Defaults, Row, RowFailure
from moedge.runtime.settings.errors import InputChanged, InputRefused, InputUnreadable

LINES = st.sampled_from([
    b'{"prompt":"a"}', b'{"id":"x","prompt":"\xc3\xa9"}', b' {"prompt":"\\u00e9","top_p":5e-1,"seed":18446744073}\t',
    b"", b" \t", b"{oops", b"x" * 70_000,
])  # fmt: skip


Rows = list[Row | RowFailure]


def read_at_places(path: Path, folder: Path) -> tuple[RowFile, RowIndex, Rows]:
    """The file as a job reads it a second time, where its rows are, and what they were the first time."""
    places = RowIndex()
    with path.open("rb") as file:
        rows = list(rows_from(file, Defaults(), index=places))
    return RowFile(seekable(path, folder), places, Defaults()), places, rows


@given(
    st.lists(LINES),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf", 2 * b"\xef\xbb\xbf"]),
    st.sampled_from([bytes, gzip.compress]),
)
def test_every_row_is_read_at_its_place(
    lines: list[bytes], end: bytes, mark: bytes, pack: Callable[[bytes], bytes]
) -> None:
    with TemporaryDirectory() as name:
        path, folder = Path(name) / "in.jsonl", JobFolder(Path(name) / "out.job")
        folder.make()
        path.write_bytes(pack(mark + end.join(lines)))
        file, places, wanted = read_at_places(path, folder.path)
    assert len(places) == len(wanted)
    for row in reversed(wanted):
        if isinstance(row, Row):
            assert file.row(row.index) == row
        assert places.line_number(row.index) == row.line


def test_equal_lines_have_equal_digests(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt":"a"}\n{"prompt":"a"}\n{"prompt":"b"}\n')
    _, places, _ = read_at_places(path, tmp_path)
    assert places.digest(0) == places.digest(1) != places.digest(2)


@pytest.mark.parametrize("change", [b"a\nc\n", b"a", b"a\n", b"ab", b"\na\nb\n", b"", b"a\r\nb\r\n"])
def test_a_line_that_is_not_what_it_was_when_the_file_was_first_read_is_not_used(tmp_path: Path, change: bytes) -> None:
    path, places = tmp_path / "in.jsonl", RowIndex()
    path.write_bytes(b'{"prompt":"a"}\n{"prompt":"b"}\n')
    with path.open("rb") as file:
        assert len(list(rows_from(file, Defaults(), index=places))) == 2
    path.write_bytes(change.replace(b"a", b'{"prompt":"a"}').replace(b"b", b'{"prompt":"b"}'))
    with seekable(path, tmp_path) as again:
        rows = RowFile(again, places, Defaults())
        assert not change.startswith(b"a") or rows.row(0).line == 1
        with pytest.raises(InputChanged, match="line 2 of the input was changed"):
            rows.row(1)


def test_gzip_is_unpacked_into_a_file_without_a_name(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "out.job")
    folder.make()
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"prompt":"a"}\n{"prompt":"b"}\n'))
    rows, _, _ = read_at_places(path, folder.path)
    assert [rows.row(row).prompts[0].text for row in (1, 0)] == ["b", "a"]
    assert list(folder.path.iterdir()) == []


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bytes], None]:
    def pipe(data: bytes) -> None:
        source = tmp_path / "pipe"
        source.write_bytes(data)
        monkeypatch.setattr("sys.stdin", source.open())

    return pipe


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_comes_through_a_pipe_is_kept_and_must_be_the_same_the_next_time(
    pack: Callable[[bytes], bytes],
    piped: Callable[[bytes], None],
    job: Callable[..., Any],
    outputs: Callable[[], dict[str, bytes]],
    tmp_path: Path,
) -> None:
    from moedge.runtime.jobs.stop import Limits

    rows = pack("".join(json.dumps({"id": str(row), "prompt": "x"}) + "\n" for row in range(6)).encode())
    piped(rows)
    job(input=Path("-"), limits=Limits(max_rows=2))
    assert (tmp_path / "out.job" / "input").read_bytes() == rows
    piped(pack(b'{"id":"9","prompt":"x"}\n'))
    with pytest.raises(InputChanged, match="the rows from the pipe differ from those"):
        job(input=Path("-"))
    assert (tmp_path / "out.job" / "input").read_bytes() == rows
    piped(rows)
    assert job(input=Path("-")).finished
    assert len(outputs()["out.jsonl"].splitlines()) == 6


def test_what_comes_through_a_pipe_is_called_standard_input(
    piped: Callable[[bytes], None], job: Callable[..., Any]
) -> None:
    piped(b"\n")
    with pytest.raises(InputRefused, match=r"^standard input contains no rows$"):
        job(input=Path("-"))


def test_rows_are_not_waited_for_from_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(io.BytesIO()))
    with pytest.raises(InputUnreadable, match="standard input is a terminal"):
        regular_input(Path("-"), JobFolder(tmp_path))
