"""Prompts from columns and templates, messages from prompts, and one schema for all rows
(`runtime/rows/row_formats.py`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.runtime.rows.row import ChatPrompt, Defaults, Row, RowFailure, TextPrompt
from moedge.runtime.rows.row_formats import Columns, read_schema, settled, text_or_file
from moedge.runtime.settings.errors import BadArgument, InputUnreadable

Read = Callable[..., list[Any]]
REVIEW = {"ticket": 12, "review": "Good", "stars": 5, "note": None}


def one(read: Read, line: dict[str, Any], **defaults: Any) -> Any:
    (row,) = read(json.dumps(line).encode(), **defaults)
    return row


def test_a_column_is_the_prompt_and_another_the_id(read: Read) -> None:
    row = one(read, REVIEW, prompt_column="review", id_column="ticket")
    assert (row.id, row.prompts) == ("12", (TextPrompt("Good"),))
    assert row.own == {"ticket": 12, "stars": 5, "note": None}


def test_a_template_makes_the_prompt_and_every_column_comes_back(read: Read) -> None:
    row = one(read, REVIEW, prompt="{{ review }} ({{ stars }}{{ note }}) {{ [stars] | tojson }}")
    assert row.prompts == (TextPrompt("Good (5) [5]"),)
    assert row.own == REVIEW
    wrapped = one(read, {"id": "a", "prompt": "x", "seed": 3}, prompt="Say: {{ prompt }}")
    assert (wrapped.prompts, wrapped.params.seed) == ((TextPrompt("Say: x"),), 3)


def test_with_chat_a_prompt_becomes_a_message_behind_the_system_message(read: Read) -> None:
    row = one(read, REVIEW, prompt_column="review", system="Be {{ stars }}", chat=True)
    assert row.prompts == (ChatPrompt(({"role": "system", "content": "Be 5"}, {"role": "user", "content": "Good"})),)
    own = {"messages": [{"role": "user", "content": "a"}]}
    assert len(one(read, own, system="S", chat=True).prompts[0].messages) == 2
    has = {"messages": [{"role": "developer", "content": "d"}, *own["messages"]]}
    assert len(one(read, has, system="S", chat=True).prompts[0].messages) == 2


def test_columns_of_settings_are_settings_unless_a_template_uses_them(read: Read) -> None:
    line = {"q": "x", "max_tokens": 3}
    assert one(read, line, prompt_column="q").params.max_tokens == 3
    used = one(read, line, prompt="{{ q }} {{ max_tokens }}")
    assert (used.params.max_tokens, used.own) == (256, line)


@pytest.mark.parametrize(
    ("line", "defaults", "code"),
    [
        ({"a": "x"}, {"prompt_column": "b"}, "missing_parameter"),
        ({"b": None}, {"prompt_column": "b"}, "missing_parameter"),
        ({"b": 1}, {"prompt_column": "b"}, "invalid_type"),
        ({"b": ""}, {"prompt_column": "b"}, "invalid_value"),
        ({"b": ""}, {"prompt_column": "b", "chat": True}, "invalid_value"),
        ({"b": "x", "messages": []}, {"prompt_column": "b"}, "invalid_value"),
        ({"a": "x"}, {"prompt": "{{ a }}{{ b }}"}, "missing_parameter"),
        ({"a": {"b": 1}}, {"prompt": "{{ a.c }}"}, "missing_parameter"),
        ({"a": 0}, {"prompt": "{{ 1 / a }}"}, "invalid_value"),
        ({"a": "x"}, {"prompt": "{{ a.__class__.__mro__ }}"}, "invalid_value"),
        ({"a": "{0.__class__}"}, {"prompt": "{{ a.format(a) }}"}, "invalid_value"),
        ({"a": "x" * 99}, {"prompt": "{% for i in range(99999) %}{{ a }}{{ a }}{% endfor %}"}, "invalid_value"),
        ({"a": "x"}, {"prompt_column": "a", "id_column": "b"}, "missing_parameter"),
        ({"id": ["x"], "a": "x"}, {"prompt_column": "a"}, "invalid_id"),
    ],
)
def test_a_row_that_does_not_fit_is_an_error_of_that_row(
    read: Read, line: dict[str, Any], defaults: dict[str, Any], code: str
) -> None:
    row = one(read, line, **defaults)
    assert isinstance(row, RowFailure)
    assert row.code == code


def test_the_text_of_a_row_is_never_a_template(read: Read) -> None:
    hostile = "{{ 7 * 7 }}{% for i in range(9) %}x{% endfor %}"
    assert one(read, {"a": hostile}, prompt="{{ a }}!").prompts == (TextPrompt(hostile + "!"),)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"prompt": "{{ a", "chat": None}, "--prompt: "),
        ({"prompt": "prompt text"}, "every row would be the same"),
        ({"prompt": "{{ a }}", "prompt_column": "a"}, "both given"),
        ({"system": "S", "chat": False}, "chat template"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(defaults: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        Columns(Defaults(**defaults))


def test_what_is_left_open_follows_the_input_and_the_model() -> None:
    assert settled(Defaults(), True, True) == Defaults(prompt_column="text", chat=True)
    assert settled(Defaults(prompt="{{ a }}"), True, False) == Defaults(prompt="{{ a }}", chat=False)
    assert settled(Defaults(), False, True) == Defaults()
    assert settled(Defaults(prompt_column="a", chat=False), False, True).chat is False
    with pytest.raises(BadArgument, match="--system"):
        settled(Defaults(system="S"), False, False)


def test_a_schema_for_all_rows_gives_way_to_that_of_a_row(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    schema = read_schema(path)
    line = {"prompt": "x"}
    assert one(read, line, schema=schema).schema == schema
    assert one(read, {**line, "response_format": {"type": "text"}}, schema=schema).schema is None
    row = one(read, {**line, "response_format": {"type": "json_object"}}, schema=schema)
    assert isinstance(row, Row)
    assert row.schema not in (None, schema)
    for text in ("{", "[1]", '{"type": "wrong"}', '{"not": {}}'):
        path.write_text(text)
        with pytest.raises(InputUnreadable, match="--schema"):
            read_schema(path)


def test_a_template_is_a_file_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    with pytest.raises(InputUnreadable, match="no such file"):
        text_or_file(str(path), "--prompt")
    path.write_bytes(b"Say {{ a }}\n")
    assert text_or_file(str(path), "--prompt") == "Say {{ a }}"
    assert text_or_file("Say {{ a }}", "--prompt") == "Say {{ a }}"
    assert text_or_file("x" * 5000, "--prompt") == "x" * 5000
    path.write_bytes(b"\xff")
    with pytest.raises(InputUnreadable, match="UTF-8"):
        text_or_file(str(path), "--prompt")
