"""Case I6 of the failure table for whole files: encodings, compression, and what is no file at all."""

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.runtime.rows.preflight import preflight
from moedge.runtime.rows.reader import read_rows
from moedge.runtime.rows.row import Defaults, ErrorCode, Row, RowFailure
from moedge.runtime.settings.errors import InputUnreadable

TEXT = '{"prompt":"caf\u00e9"}\r\n\r\n{"prompt":"b"}\n'


def ids(rows: list[Row | RowFailure]) -> list[str]:
    assert all(isinstance(row, Row) for row in rows)
    return [row.id for row in rows]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_utf8_is_read_with_and_without_mark_and_compression_whatever_its_name(
    tmp_path: Path, encoding: str, zipped: bool, name: str
) -> None:
    data = TEXT.encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if zipped else data)
    rows = list(read_rows(path, Defaults()))
    assert ids(rows) == ["line-1", "line-3"]
    assert rows == list(read_rows(str(path), Defaults()))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("zipped", [False, True])
def test_i6_utf16_and_utf32_are_refused_as_a_file(read: Callable[..., list[Any]], encoding: str, zipped: bool) -> None:
    data = TEXT.encode(encoding)
    (bad,) = read(gzip.compress(data) if zipped else data)
    assert bad.code is ErrorCode.UNSUPPORTED_ENCODING
    assert str(bad).startswith("file: unsupported_encoding: ")


def test_a_mark_is_text_anywhere_but_at_the_start(read: Callable[..., list[Any]]) -> None:
    good, bad = read(b'\n{"prompt":"\xef\xbb\xbf"}\n\xef\xbb\xbf{"prompt":"a"}')
    assert good.prompts[0].text == "\ufeff"
    assert bad.code is ErrorCode.INVALID_JSON_LINE


@pytest.mark.parametrize("damage", ["cut", "header only", "flipped", "tail"])
def test_damaged_gzip_ends_with_one_error_for_the_file(read: Callable[..., list[Any]], damage: str) -> None:
    lines = b"".join(b'{"prompt":"%d"}\n' % (i * 7919) for i in range(2_000))
    whole = bytearray(gzip.compress(lines))
    if damage == "flipped":
        whole[len(whole) // 2] ^= 0xFF
    data = {"cut": whole[: len(whole) // 2], "header only": whole[:5], "tail": whole + b"junk"}.get(damage, whole)
    *_, last = read(bytes(data))
    assert last.code is ErrorCode.DAMAGED_GZIP
    assert last.line == 0


def test_gzip_of_several_members_is_one_file(read: Callable[..., list[Any]]) -> None:
    halves = gzip.compress(b'{"prompt":"a"}\n{"pro') + gzip.compress(b'mpt":"b"}\n')
    assert [row.prompts[0].text for row in read(halves)] == ["a", "b"]


def test_standard_input_is_read_as_rows() -> None:
    code = (
        "from moedge.runtime.rows.reader import read_rows; from moedge.runtime.rows.row import Defaults\n"
        "print(*[row.id for row in read_rows('-', Defaults())])"
    )
    found = subprocess.run([sys.executable, "-c", code], input=TEXT.encode(), capture_output=True, check=True)
    assert found.stdout.split() == [b"line-1", b"line-3"]


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputUnreadable, match="No such file"):
        list(read_rows(tmp_path / "absent.jsonl", Defaults()))
    with pytest.raises(InputUnreadable, match="Is a directory"):
        preflight(tmp_path, Defaults())


def test_what_can_be_read_once_only_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "-", Path("-"), "/dev/null"):
        with pytest.raises(InputUnreadable, match="save it to a file"):
            preflight(path, Defaults())
