"""`response_format` in OpenAI's form (`runtime/rows/fields.py`): read, refused where it cannot be kept, and answered
whole or not at all.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moedge.runtime.rows.answer_formats import Answers
from moedge.runtime.rows.row import ErrorCode, Row, RowFailure, Severity
from moedge.runtime.sampling.grammar import ANY_OBJECT
from moedge.runtime.settings.errors import MissingExtra

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
Make = Callable[..., Any]


def wrapped(schema: Any, **beside: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **beside}}


def test_the_schema_keeps_the_order_of_its_properties(chat: Make, complete: Make, short: Make) -> None:
    rows = [make(response_format=wrapped(SCHEMA, strict=True)) for make in (chat, complete)]
    rows.append(short(prompt="a", response_format=wrapped(SCHEMA)))
    for row in rows:
        assert isinstance(row, Row)
        assert row.schema == json.dumps(SCHEMA, separators=(",", ":"))


def test_any_object_and_plain_text(chat: Make) -> None:
    assert chat(response_format={"type": "json_object"}).schema == ANY_OBJECT
    assert chat(response_format={"type": "text"}).schema is None
    assert chat(response_format=None).schema is None


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        ("json", ErrorCode.INVALID_TYPE, "response_format"),
        ({"type": "xml"}, ErrorCode.INVALID_VALUE, "response_format.type"),
        ({"type": "json_object", "schema": {}}, ErrorCode.UNKNOWN_PARAMETER, "response_format.schema"),
        ({"type": "json_schema"}, ErrorCode.INVALID_TYPE, "response_format.json_schema"),
        (wrapped(None), ErrorCode.MISSING_PARAMETER, "response_format.json_schema.schema"),
        (wrapped([1]), ErrorCode.INVALID_TYPE, "response_format.json_schema.schema"),
        (wrapped({}, strict="yes"), ErrorCode.INVALID_TYPE, "response_format.json_schema.strict"),
        (wrapped({}, shape=1), ErrorCode.UNKNOWN_PARAMETER, "response_format.json_schema.shape"),
        (wrapped({"type": "foo"}), ErrorCode.INVALID_JSON_SCHEMA, "response_format"),
        (wrapped({"not": {}}), ErrorCode.INVALID_JSON_SCHEMA, "response_format"),
    ],
)
def test_what_cannot_be_kept_is_an_error_of_its_row(chat: Make, value: Any, code: ErrorCode, param: str) -> None:
    row = chat(response_format=value)
    assert isinstance(row, RowFailure)
    assert (row.code, row.param) == (code, param)
    assert row.code.severity is Severity.ROW


@pytest.mark.parametrize("other", [{"stop": "}"}, {"stop_token_ids": [5]}, {"ignore_eos": True}])
def test_nothing_else_may_end_json(chat: Make, other: dict[str, Any]) -> None:
    row = chat(response_format={"type": "json_object"}, **other)
    assert isinstance(row, RowFailure)
    assert (row.code, row.param) == (ErrorCode.INVALID_VALUE, next(iter(other)))


def test_a_file_of_one_schema_compiles_it_once(read: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from moedge.runtime.rows import fields

    compiled: list[str] = []
    monkeypatch.setattr(fields, "compile_schema", compiled.append)
    line = json.dumps({"prompt": "a", "response_format": wrapped(SCHEMA)})
    assert len(read("\n".join([line] * 50).encode())) == 50
    assert len(compiled) == 1


def test_without_llguidance_the_job_does_not_start(chat: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match="pip install"):
        chat(response_format={"type": "json_object"})
    assert isinstance(chat(response_format={"type": "text"}), Row)


def test_an_error_carries_the_text_so_far_in_every_form(chat: Make, short: Make) -> None:
    answers = Answers("m", 0, lambda token_id: ("", None))
    failures = [row.failure(ErrorCode.INCOMPLETE_OUTPUT, "cut") for row in (chat(), short(prompt="a"))]
    chatted, brief = (json.loads(answers.failure(replace(each, partial=('{"a": 1',)))) for each in failures)
    assert chatted["response"]["status_code"] == 400
    assert chatted["response"]["body"]["error"]["partial"] == '{"a": 1'
    assert brief["error"] == {"code": "incomplete_output", "message": "cut", "param": None, "partial": '{"a": 1'}
    assert json.loads(answers.failure(replace(failures[1], partial=("a", "b"))))["error"]["partial"] == ["a", "b"]
    assert "partial" not in json.loads(answers.failure(failures[1]))["error"]
