"""Questions: tasks have prompts (`apps/documents/question.py`), fields become schemas, and quotes are looked for in the
text (`apps/documents/schemas.py`).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from moedge.apps.documents.question import NEEDS_PROMPT, NEEDS_SCHEMA, TASKS, make_question
from moedge.apps.documents.schemas import fields_schema, find_quote, find_schema, quotes, without_own
from moedge.runtime.settings.errors import BadArgument, InputUnreadable


class Invoice(BaseModel):
    number: str
    total: float | None


def test_fields_are_a_schema_that_allows_what_is_unknown() -> None:
    schema = fields_schema("title, date: date, amount: number, kind: letter|invoice, tags: list, paid: boolean")
    valid = Draft202012Validator(schema)
    unknown: dict[str, Any] = dict.fromkeys(schema["properties"])
    assert valid.is_valid({**unknown, "kind": "letter"})
    assert valid.is_valid({**unknown, "kind": "invoice", "amount": 2.5, "tags": ["a"], "title": "x", "paid": True})
    assert not valid.is_valid({**unknown, "kind": "poem"})
    assert not valid.is_valid({**unknown, "kind": "letter", "amount": "2.5"})
    assert not valid.is_valid({"title": "x"})
    assert find_schema(None, "title, date: date, amount: number, kind: letter|invoice, at: quote") is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [("", "names no field"), ("a b", "is not a name"), ("a, a", "a name twice"), ("a: money", "use text, string")],
)
def test_fields_that_cannot_be_are_refused(fields: str, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        fields_schema(fields)


def test_a_schema_comes_from_a_model_or_a_file(tmp_path: Path) -> None:
    module = Invoice.__module__
    found = find_schema(f"{module}:Invoice", None) if ":" not in module else None
    assert found is not None
    assert list(json.loads(found)["properties"]) == ["number", "total"]
    (tmp_path / "s.json").write_text('{"type": "object", "properties": {"a": {"type": "string"}}}')
    assert "properties" in json.loads(find_schema(str(tmp_path / "s.json"), None) or "")
    with pytest.raises(InputUnreadable, match="no_such_module"):
        find_schema("no_such_module:Model", None)
    with pytest.raises(BadArgument, match="keep one of them"):
        find_schema("s.json", "a")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_asks_for_what_it_needs(task: str) -> None:
    given = {"task": task, "prompt": "German" if task in NEEDS_PROMPT else None}
    given["fields"] = "kind: a|b" if task in NEEDS_SCHEMA else None
    question = make_question(given)
    head, _, document = question.prompt.partition("Document")
    assert "{{ text }}" in document
    assert "{{ text }}" not in head
    assert "{{ path }}" not in head, "rows would not share what comes before it"
    if task in NEEDS_PROMPT:
        with pytest.raises(BadArgument, match=NEEDS_PROMPT[task]):
            make_question({**given, "prompt": None})
    if task in NEEDS_SCHEMA:
        with pytest.raises(BadArgument, match="needs --fields or --schema"):
            make_question({**given, "fields": None})


def test_a_prompt_without_the_text_gets_it_at_its_end() -> None:
    assert make_question({"prompt": "What is it?"}).prompt == "What is it?\n\n{{ text }}"
    assert make_question({"prompt": "See {{ text }}: what is it?"}).prompt == "See {{ text }}: what is it?"
    with pytest.raises(BadArgument, match="nothing is asked"):
        make_question({})
    with pytest.raises(BadArgument, match="all rows share the system message"):
        make_question({"prompt": "a", "system": "about {{ path }}"})


def test_quotes_are_found_whatever_the_line_ends() -> None:
    schema = {
        "properties": {
            "said": {"type": "string", "x-quote": True},
            "list": {"items": {"properties": {"q": {"x-quote": True}, "n": {}}}},
        }
    }
    answer = {"said": "the price is 4", "list": [{"q": "on time", "n": "x"}, {"q": None}]}
    assert list(quotes(schema, answer)) == [("said", "the price is 4"), ("list[0].q", "on time")]
    assert "x-quote" not in json.dumps(without_own(schema))
    text = "We say: the price\nis  4 euros. (a+b)"
    start, end = find_quote("the price is 4", text) or (0, 0)
    assert text[start:end] == "the price\nis  4"
    assert find_quote("(a+b)", text) is not None
    assert find_quote("the price is 5", text) is None
    assert find_quote(" ", text) is None
