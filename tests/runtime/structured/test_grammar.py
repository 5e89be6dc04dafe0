"""What a schema may be (`runtime/sampling/grammar.py`): followed exactly or refused, whatever a hostile one asks."""

import json
import sys
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from moedge.runtime.sampling.grammar import MAX_SCHEMA_NBYTES, Lark, SchemaError, compile_schema
from moedge.runtime.settings.errors import MissingExtra


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def alternatives(index: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": {f"{side}{index}": {"const": 1}}} for side in "ab"]}


CANNOT_BE_PROMISED = {
    "not": ({"not": {"type": "string"}}, "not"),
    "conditional": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "exactly one of two that overlap": ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "oneOf"),
    "an unknown format": ({"type": "string", "format": "foo"}, "foo"),
    "no schema": ({"type": "foo"}, "foo"),
    "nothing is allowed": ({"enum": []}, "Unsatisfiable"),
    "an empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "regex"),
    "a back reference": ({"type": "string", "pattern": r"(a)\1"}, "regex"),
    "another file": ({"$ref": "file:///etc/passwd"}, "retriev"),
    "another host": ({"$ref": "http://127.0.0.1:9/schema"}, "retriev"),
}
TOO_MUCH = {
    "many alternatives": {"enum": [f"value {index}" for index in range(200_000)]},
    "more bytes than are read": {"description": "a" * MAX_SCHEMA_NBYTES},
    "combinations": {"allOf": [alternatives(index) for index in range(30)]},
    "depth": nested(200),
}


@pytest.mark.parametrize(("schema", "says"), CANNOT_BE_PROMISED.values(), ids=CANNOT_BE_PROMISED)
def test_what_a_grammar_cannot_promise_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        compile_schema(json.dumps(schema))


@pytest.mark.parametrize("schema", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_schema_that_is_too_much_work_is_refused_in_one_short_line(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError) as refusal:
        compile_schema(json.dumps(schema))
    assert len(str(refusal.value)) <= 300
    assert "\n" not in str(refusal.value)
    assert "%json" not in str(refusal.value) or "recursion" in str(refusal.value)


def test_a_regex_that_is_refused_says_why() -> None:
    with pytest.raises(SchemaError, match=r"regex parse error: error: look-around"):
        compile_schema(Lark.of_regex("(?=x)a"))


@pytest.mark.parametrize("wrap", [lambda schema: schema, lambda schema: {"properties": {"a": schema}}])
def test_a_schema_cannot_switch_checks_off(wrap: Any) -> None:
    """llguidance takes options from the schema itself; ours come after them."""
    with pytest.raises(SchemaError, match="not"):
        compile_schema(json.dumps(wrap({"not": {"type": "string"}, "x-guidance": {"lenient": True}})))


def test_without_llguidance_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install .*'llguidance[<>=\d.,]+'$"):
        compile_schema("{}")


def test_a_schema_nested_beyond_what_python_reads_is_refused() -> None:
    deep = '{"type": "array", "items": ' * 4000 + "{}" + "}" * 4000
    with pytest.raises(SchemaError, match="nested too deeply"):
        compile_schema(deep)


INTEGER, NULL = {"type": "integer"}, {"type": ["integer", "null"]}
# Schemas, and texts that they take or not.
INTEGERS = {
    "no bounds": (INTEGER, ["-999999999999999", "0", "12"], ["1" * 16, "-" + "1" * 16]),
    "or null": (NULL, ["null", "7"], ["1" * 16]),
    "a property called type": ({"properties": {"type": INTEGER}}, ['{"type": 12}'], ['{"type": ' + "1" * 16 + "}"]),
    "one bound": (INTEGER | {"minimum": 0}, ["0", "9" * 15], ["-1", "1" * 16]),
    "a large bound": (INTEGER | {"minimum": 10**16}, ["1" * 17], ["-1"]),
    "values": ({"type": "integer", "enum": [10**15]}, ["1" + "0" * 15], ["2"]),
    "any number": ({"type": "number"}, ["1" * 16], ["x"]),
}


@pytest.mark.parametrize(("schema", "takes", "refuses"), INTEGERS.values(), ids=INTEGERS)
def test_integers_without_bounds_have_fifteen_digits(
    schema: dict[str, Any], takes: list[str], refuses: list[str]
) -> None:
    """30 of 50 rows of a small model wrote digits up to max_tokens."""
    grammar = compile_schema(json.dumps(schema))

    def taken(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), grammar)
        return matcher.validate_tokens(list(text.encode())) == len(text)

    assert all(map(taken, takes))
    assert not any(map(taken, refuses))
