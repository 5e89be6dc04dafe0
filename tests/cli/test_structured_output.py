"""Rows with a schema (`runtime/sampling/grammar.py`) through the command line and the demo model: JSON of the schema,
or nothing that looks like it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

Rows = list[dict[str, Any]]
MODEL = Path(__file__).parents[2] / "examples" / "tiny_moe" / "model"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def ask(row_id: str, **fields: Any) -> dict[str, Any]:
    question = {"messages": [{"role": "user", "content": "Tell of Moses."}], "response_format": FORM}
    return {"id": row_id, "max_tokens": 60, **question, **fields}


@pytest.fixture
def answers(
    cli: Callable[..., int],
    rows_file: Callable[[Path, Rows], Path],
    rows_of: Callable[[Path], Rows],
    tmp_path: Path,
) -> Callable[..., dict[str, Any]]:
    """Answers by id of a job of these rows, which must end with `code`."""

    def run(rows: Rows, *options: str, code: int = 0) -> dict[str, Any]:
        source, output = rows_file(tmp_path / "in.jsonl", rows), tmp_path / f"out{len(list(tmp_path.iterdir()))}.jsonl"
        assert cli("batch", MODEL, source, "-o", output, "--quiet", *options) == code
        errors = output.with_name(output.stem + ".errors.jsonl")
        return {row["id"]: row for path in (output, errors) if path.exists() for row in rows_of(path)}

    return run


def test_every_kind_of_row_is_answered_with_json(answers: Callable[..., dict[str, Any]]) -> None:
    rows = [
        ask("greedy"),
        ask("sampled", temperature=1.0, seed=3),
        ask("several", temperature=1.0, n=4),
        ask("penalised", repetition_penalty=1.3, presence_penalty=1.0),
        ask("free", response_format={"type": "text"}),
        ask("cut", max_tokens=3),
    ]
    found = answers(rows, code=3)
    choices = [choice for name in ("greedy", "sampled", "penalised") for choice in [found[name]]]
    for choice in [*choices, *found["several"]["choices"]]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert len({choice["text"] for choice in found["several"]["choices"]}) > 1
    assert "{" not in found["free"]["text"]
    assert found["cut"]["error"]["code"] == "incomplete_output"
    assert found["cut"]["error"]["partial"].startswith("{")


def test_answers_do_not_depend_on_the_batch(answers: Callable[..., dict[str, Any]]) -> None:
    rows = [ask(f"row-{index}", temperature=0.9, n=1 + index) for index in range(3)]
    exact = ("--dtype", "fp32", "--deterministic")
    assert answers(rows, *exact) == answers(rows, *exact, "--max-sequences", "3", "--tokens-per-pass", "20")


def test_a_schema_that_cannot_be_promised_is_an_error_row(answers: Callable[..., dict[str, Any]]) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    # Its compilation succeeds; following it needs more states than are granted.
    heavy = {"type": "string", "pattern": r"^(\w{1,300}[^a]{1,300}){50}$"}
    hostile = {"type": "json_schema", "json_schema": {"name": "x", "schema": heavy}}
    empty = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    rows = [
        ask("bad", response_format=bad),
        ask("empty", response_format=empty),
        ask("heavy", response_format=hostile, max_tokens=400),
        ask("good"),
    ]
    found = answers(rows, code=3)
    assert found["bad"]["error"]["code"] == "invalid_json_schema"
    assert found["empty"]["error"]["code"] == "invalid_json_schema"
    assert found["heavy"]["error"]["code"] == "invalid_json_schema"
    assert "cannot be followed" in found["heavy"]["error"]["message"]
    assert found["good"]["finish_reason"] == "stop"
