"""Any row of a file at once is the row that reading it from the start gives."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.refusals import InputChanged, InputUnreadable
from moedge.runtime.jobs.row_file import RowFile
from moedge.runtime.jobs.rows import Defaults, Row
from moedge.runtime.jobs.spool import regular_input, seekable

LINES = st.sampled_from([b'{"prompt":"a"}', b'{"id":"x","prompt":"\xc3\xa9"}', b"", b" \t", b"{oops", b"x" * 70_000])


def row_file(data: bytes) -> RowFile:
    return RowFile(io.BufferedReader(io.BytesIO(data)), Defaults())  # type: ignore[arg-type]


@given(st.lists(LINES), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_every_row_is_read_at_its_place(lines: list[bytes], end: bytes, marked: bool) -> None:
    from moedge.runtime.jobs.reader import rows_from

    data = (b"\xef\xbb\xbf" if marked else b"") + end.join(lines)
    file = row_file(data)
    wanted = list(rows_from(io.BufferedReader(io.BytesIO(data)), Defaults()))  # type: ignore[arg-type]
    assert len(file) == len(wanted)
    for row in reversed(wanted):
        if isinstance(row, Row) and row.id != "x":
            assert file.row(row.index) == row
        assert file.line_number(row.index) == row.line


def test_equal_lines_have_equal_digests_and_a_changed_one_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt":"a"}\n{"prompt":"a"}\n{"prompt":"b"}\n')
    with path.open("rb") as opened:
        file = RowFile(opened, Defaults())
        assert file.digest(0) == file.digest(1) != file.digest(2)
        path.write_bytes(path.read_bytes().replace(b"b", b"c"))
        assert file.row(1).line == 2
        opened.seek(0)
        with pytest.raises(InputChanged, match="line 3 of the input was changed"):
            RowFile.row(file, 2)


def test_gzip_is_unpacked_into_a_file_without_a_name(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "out.job")
    folder.make()
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"prompt":"a"}\n{"prompt":"b"}\n'))
    with seekable(path, folder) as file:
        rows = RowFile(file, Defaults())
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
    from moedge.runtime.jobs.limits import Limits

    rows = pack("".join(json.dumps({"id": str(row), "prompt": "x"}) + "\n" for row in range(6)).encode())
    piped(rows)
    job(input=Path("-"), limits=Limits(max_rows=2))
    assert (tmp_path / "out.job" / "input").read_bytes() == rows
    piped(pack(b'{"id":"9","prompt":"x"}\n'))
    with pytest.raises(InputChanged, match="other rows came through the pipe"):
        job(input=Path("-"))
    assert (tmp_path / "out.job" / "input").read_bytes() == rows
    piped(rows)
    assert job(input=Path("-")).finished
    assert len(outputs()["out.jsonl"].splitlines()) == 6


def test_rows_are_not_waited_for_from_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(io.BytesIO()))
    with pytest.raises(InputUnreadable, match="no rows come from the terminal"):
        regular_input(Path("-"), JobFolder(tmp_path))
