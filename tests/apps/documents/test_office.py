"""The folder of an office from end to end (`apps/documents/run.py`, `moedge docs`): 120 files, what lies in them, and
the workbook that comes of it, as LibreOffice reads it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from openpyxl.utils.escape import unescape

from support.office_folder import NUM_FILES, count_files, make_office

pytestmark = pytest.mark.slow
MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model"
# What a spreadsheet would like to be something else.
CELLS = {
    "formula": "=1+1", "postcode": "00123", "phone": "+49 30 1", "date": "2024-05-01", "total": 12.5, "count": 7,
    "address": "Große Straße 1\n10115 Köln \U0001f600", "escape": "_x0041_ 'a', \"b\"; c",
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {name: {"const": value} for name, value in CELLS.items()},
    "required": list(CELLS),
    "additionalProperties": False,
}
# Separated by commas, UTF-8, text in quotation marks and nothing else, values and not what a cell shows, and formulas.
FILTER = "csv:Text - txt - csv (StarCalc):44,34,76,1,,0,true,false,true"


def docs(folder: Path, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "moedge", "docs", str(MODEL), str(folder), "-o", str(tmp_path / "out.xlsx")]
    given = ["--task", "extract", "--schema", str(tmp_path / "schema.json"), "--chunk-tokens", "2000", "--ram", "3GiB"]
    return subprocess.run(
        [*command, *given, *options], capture_output=True, text=True, env=environment, check=False, timeout=900
    )


def table(path: Path) -> list[list[Any]]:
    (sheet,) = openpyxl.load_workbook(path).worksheets
    assert not any(cell.data_type == "f" for row in sheet.iter_rows() for cell in row), "a cell is a formula"
    values = [[cell.value for cell in row] for row in sheet.iter_rows()]
    return [[unescape(value) if isinstance(value, str) else value for value in row] for row in values]


def records(path: Path) -> dict[str, dict[str, Any]]:
    """The rows by their document, each of which has one."""
    header, *rows = table(path)
    found = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert len(found) == len(rows)
    return found


def codes(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: (row["error"] or "").partition(":")[0] for name, row in found.items()}


def calc_rows(text: str) -> Iterator[list[Any]]:
    """The rows of a CSV in which text is quoted and everything else is not: text, numbers, or nothing."""
    row: list[Any] = []
    for quoted, plain, end in re.findall(r'(?:"((?:[^"]|"")*)"|([^",\n]*))(,|\n)', text):
        row.append(quoted.replace('""', '"') if quoted or not plain else float(plain))
        if end != ",":
            yield row
            row = []


def test_every_document_of_an_office_is_a_row_and_every_cell_is_what_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    wanted = make_office(folder, tmp_path / "outside")
    assert count_files(folder) == NUM_FILES
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    out = tmp_path / "out.xlsx"
    done = docs(folder, tmp_path, "--max-tokens", "30")
    assert done.returncode == 3, done.stderr
    assert f"found {len(wanted)} files" in done.stderr, "what lies in files, too"
    cut = {name: code or "incomplete_output" for name, code in wanted.items()}
    assert codes(records(out)) == cut
    done = docs(folder, tmp_path, "--max-tokens", "400", "--cut")
    assert done.returncode == 3, done.stderr
    found = records(out)
    assert codes(found) == wanted
    for name, code in wanted.items():
        assert {key: found[name][key] for key in CELLS} == (CELLS if not code else dict.fromkeys(CELLS)), name
    number_read = sum(code == "" for code in wanted.values())
    counts = f"{len(wanted)} documents: {number_read} answered, {len(wanted) - number_read} unreadable"
    assert counts in done.stderr
    if shutil.which("soffice") is None:
        pytest.skip("LibreOffice is not installed: the workbook was read by openpyxl alone")
    profile = f"-env:UserInstallation={(tmp_path / 'office').as_uri()}"
    command = ["soffice", profile, "--headless", "--convert-to", FILTER, "--outdir", str(tmp_path / "csv"), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    read = list(calc_rows((tmp_path / "csv" / "out.csv").read_text("utf-8-sig")))
    for ours, theirs in zip_longest(table(out), read, fillvalue=[]):
        assert [cell if cell is not None else "" for cell in ours] == theirs, ours
