"""Excel workbooks (`runtime/rows/workbook.py`) as input and output: what is text stays text, numbers are numbers."""

import io
import json
import zipfile
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import xlsxwriter

from moedge.offload.atomic_file import AtomicFile
from moedge.runtime.jobs.outputs import schema_fields, write_table
from moedge.runtime.rows import workbook
from moedge.runtime.rows.tables import InputFormat, convert, input_format
from moedge.runtime.settings.errors import InputRefused

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
SCHEMA = json.dumps({"properties": {"sum": {"type": "number"}, "note": {"type": "string"}}})


def answer(name: str, **values: Any) -> dict[str, Any]:
    return {"id": name, "text": json.dumps(values), "finish_reason": "stop", "usage": USAGE}


def written(lines: Sequence[dict[str, Any]], first: tuple[str, ...] | None = None) -> bytes:
    sink = io.BytesIO()
    write_table(".xlsx", lambda: map(json.dumps, lines), schema_fields(SCHEMA), sink.write, first=first)
    return sink.getvalue()


def cells(data: bytes) -> list[list[Any]]:
    """Of all sheets, as openpyxl reads them with formulas: one would begin with =."""
    book = openpyxl.load_workbook(io.BytesIO(data))
    return [[cell.value for cell in row] for sheet in book.worksheets for row in sheet.iter_rows()]


def test_text_is_never_a_formula_and_numbers_are_numbers() -> None:
    lines = [
        answer("a", sum=12.5, note="=HYPERLINK(\"http://x\",\"y\")"), answer("b", sum=7, note="+1 \x02 https://x.org"),
        answer("=c", sum=None, note="007"), answer("d", sum=2**60, note="{=1}"),
        {"id": "e", "error": {"code": "c", "message": "m"}},
    ]  # fmt: skip
    data = written(lines, ("id",))
    assert data == written(lines, ("id",)), "the same answers give the same bytes"
    assert cells(data) == [
        ["id", "sum", "note", "error"],
        ["a", 12.5, '=HYPERLINK("http://x","y")', None],
        ["b", 7, "+1 _x0002_ https://x.org", None],
        ["=c", None, "007", None],
        ["d", str(2**60), "{=1}", None],
        ["e", None, None, "c: m"],
    ]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        sheet = archive.read("xl/worksheets/sheet1.xml")
    assert b"<f>" not in sheet
    assert b"<hyperlink" not in sheet


def test_text_longer_than_a_cell_and_rows_beyond_a_sheet_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "MOST_CHARACTERS", 10)
    monkeypatch.setattr(workbook, "MOST_ROWS", 3)
    lines = [answer(str(number), sum=number, note="x" * 8 * number) for number in range(4)]
    assert cells(written(lines, ("id",))) == [
        ["id", "sum", "note", "note (2)", "note (3)", "error"],
        ["0", 0, None, None, None, None],
        ["1", 1, "x" * 8, None, None, None],
        ["id", "sum", "note", "note (2)", "note (3)", "error"],
        ["2", 2, "x" * 10, "x" * 6, None, None],
        ["3", 3, "x" * 10, "x" * 10, "x" * 4, None],
    ]


def rows(path: Path) -> list[dict[str, Any]]:
    with AtomicFile(path.with_suffix(".jsonl")) as target:
        convert(path, input_format(path), target)
        target.publish()
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def saved(path: Path, *lines: Sequence[Any]) -> Path:
    book = openpyxl.Workbook()
    for line in lines:
        book.active.append(line)
    book.save(path)
    return path


def test_the_rows_of_a_sheet_are_those_of_an_input(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "in.xlsx", ["id", "text", "max_tokens", "temperature", "day", None],
        [1, "One", 5, 0.5, date(2026, 5, 1), 3],
        [None] * 6, ["b", "Zwei\nÄ", None, None, datetime(2026, 5, 1, 12, 30), True],
    )  # fmt: skip
    assert input_format(path) is InputFormat.XLSX
    assert rows(path) == [
        {"id": "1", "text": "One", "max_tokens": 5, "temperature": 0.5, "day": "2026-05-01T00:00:00", "column_6": 3},
        {"id": "b", "text": "Zwei\nÄ", "day": "2026-05-01T12:30:00", "column_6": True},
    ]


def test_what_is_written_can_be_an_input(tmp_path: Path) -> None:
    path = tmp_path / "out.xlsx"
    path.write_bytes(written([answer("a", sum=1, note="n")], ("id",)))
    assert rows(path) == [{"id": "a", "sum": 1, "note": "n", "error": ""}]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"PK\3\4 no archive", "not a whole workbook"),
        (b"id,text\n", "not a whole workbook"),
        (b"", "not a whole workbook"),
    ],
)
def test_what_is_no_workbook_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "in.xlsx"
    path.write_bytes(data)
    with pytest.raises(InputRefused, match=says):
        rows(path)


def test_a_workbook_that_is_cut_or_swells_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "in.xlsx", ["text"], *(["word " * 50 + str(number)] for number in range(300)))
    whole = path.read_bytes()
    for end in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:end])
        with pytest.raises(InputRefused, match="whole workbook"):
            rows(path)
    book = xlsxwriter.Workbook(path)
    book.add_worksheet().write_column(0, 0, ["text", *("word " * 50 + str(number) for number in range(300))])
    book.close()
    assert len(rows(path)) == 300
    monkeypatch.setattr(workbook, "_MOST_SHARED_NBYTES", 10_000)
    with pytest.raises(InputRefused, match="save it as CSV"):
        rows(path)
