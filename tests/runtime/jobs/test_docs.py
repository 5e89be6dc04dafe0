"""`docs/batches.md`, after its recipes, says what the code (`runtime/rows/`) does: the same fields, values, codes, and
examples.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moedge.runtime.rows.answer_formats import Answers, Completion
from moedge.runtime.rows.fields import FIELDS, IGNORED, UNSUPPORTED
from moedge.runtime.rows.row import Defaults, Endpoint, ErrorCode, Row, RowFailure
from moedge.runtime.sampling.params import FinishReason

PAGE = (Path(__file__).parents[3] / "docs" / "batches.md").read_text().partition("\n## The input file\n")[2]


def table(header: str) -> list[list[str]]:
    """The cells of the table that starts with this header."""
    lines = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_field_table_lists_every_field_with_its_forms() -> None:
    rows = {"chat": Endpoint.CHAT, "completions": Endpoint.COMPLETION, "short": Endpoint.SHORT}
    documented = {
        name.strip("`"): set(rows.values()) if forms == "all" else {rows[form] for form in forms.split(", ")}
        for name, forms, *_ in table("| Field | Rows |")
    }
    assert documented == {name: set(checks) for name, checks in FIELDS.items()}


def test_the_documented_defaults_are_the_defaults() -> None:
    defaults = Defaults()
    for name, _, default, _ in table("| Field | Rows |"):
        if default not in ("", "derived") and hasattr(defaults, name.strip("`")):
            assert json.loads(default) == getattr(defaults, name.strip("`"))


def test_the_ignored_and_the_unsupported_fields_are_all_listed() -> None:
    ignored = PAGE[PAGE.index("Accepted without effect") :].split("\n\n")[0]
    assert code_spans(ignored) == [*IGNORED, "x-"]
    documented = {
        name: [json.loads(value) for value in code_spans(values)]
        for names, values in table("| Field | Accepted")
        for name in code_spans(names)
    }
    assert documented == {name: list(values) for name, values in UNSUPPORTED.items()}


def test_the_error_table_lists_every_code_with_what_it_stops() -> None:
    documented = {code.strip("`"): stops for code, _, stops in table("| Code | When |")}
    assert documented == {code.value: code.severity.name.lower() for code in ErrorCode}


def test_the_example_rows_are_read(read: Callable[..., list[Any]]) -> None:
    examples = re.findall(r"```json\n(.*?)```", PAGE[: PAGE.index("## Errors")], re.DOTALL)
    rows = read("".join(examples).encode())
    assert len(rows) == 7
    assert all(isinstance(row, Row) for row in rows)


def test_the_example_answers_are_what_is_written(read: Callable[..., list[Any]]) -> None:
    """Hashes and the model's name are shortened in the page."""
    examples = re.findall(r"```json\n(.*?)```", PAGE[PAGE.index("## The output") :], re.DOTALL)
    expected = "".join(examples).splitlines()
    chat = {
        "custom_id": "a-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "Hello"}]},
    }
    lines = [
        chat,
        chat | {"custom_id": "a-3", "body": {"messages": [{"role": "user", "content": "Hello"}], "echo": True}},
        {"id": "b-1", "prompt": "a"},
        {"id": "b-3", "prompt": "a", "n": 2},
        {"id": "b-4", "prompt": "a", "top_p": 1.5},
    ]  # fmt: skip
    done = [
        Completion(text, (1, 2, 3), reason, 9)
        for text, reason in (("Hi!", FinishReason.STOP), ("Hey", FinishReason.LENGTH))
    ]
    answers = Answers("\u2026", 1_750_000_000, lambda token_id: ("", None))
    found = [
        answers.failure(row) if isinstance(row, RowFailure) else answers.answer(row, done[: row.num_samples])
        for row in read(b"\n".join(json.dumps(line).encode() for line in lines))
    ]
    shortened = [re.sub(r"[0-9a-f]{32}", r"\\u2026", line) for line in found]
    assert [json.loads(line) for line in shortened] == [json.loads(line) for line in expected]
