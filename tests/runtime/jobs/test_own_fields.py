"""A row's own fields and its metadata come back in its answer (`runtime/rows/answer_formats.py`); a slip of a field's
name is refused (`runtime/rows/fields.py`), not repeated.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.runtime.rows.answer_formats import Answers, Completion
from moedge.runtime.rows.fields import FOREIGN
from moedge.runtime.rows.row import Row, RowFailure
from moedge.runtime.sampling.params import FinishReason

ANSWERS = Answers("m", 0, lambda token_id: ("", None))
DONE = [Completion("Hi", (1,), FinishReason.STOP, 2)]
BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def answered(read: Callable[[bytes], list[Any]], line: dict[str, Any]) -> dict[str, Any]:
    (row,) = read(json.dumps(line).encode())
    found = ANSWERS.failure(row) if isinstance(row, RowFailure) else ANSWERS.answer(row, DONE)
    return dict(json.loads(found))


OWN = {
    "source": "web",
    "topic": None,
    "prompt_id": 7,
    "tokens": [1],
    "url": "http://x",
    "body": "mail",
    "x-n": {"a": 1},
}


def test_a_short_row_gets_its_own_fields_back(read: Callable[..., list[Any]]) -> None:
    line = {"id": "a", "prompt": "x", "metadata": {"k": "v"}, **OWN}
    found = answered(read, line)
    assert found.items() >= {**OWN, "metadata": {"k": "v"}}.items()
    assert found.keys() - {"id", "text", "finish_reason", "usage", "metadata"} == OWN.keys()
    bad = answered(read, {**line, "top_p": 9})
    assert bad["error"]["code"] == "invalid_value"
    assert bad.items() >= OWN.items()


def test_a_batch_line_gets_its_metadata_in_the_body_and_its_own_fields_beside_it(
    read: Callable[..., list[Any]],
) -> None:
    line = {**BATCH, "body": {"prompt": "x", "metadata": {"k": "v"}}, "source": "web"}
    found = answered(read, line)
    assert found["response"]["body"]["metadata"] == {"k": "v"}
    assert found["source"] == "web"
    assert "metadata" not in answered(read, BATCH)["response"]["body"]
    failed = answered(read, {**line, "body": {"prompt": "x", "tools": [1]}})
    assert (failed["response"]["status_code"], failed["source"]) == (400, "web")


def test_a_name_that_answers_have_themselves_gets_a_prefix(read: Callable[..., list[Any]]) -> None:
    line = {"id": "a", "prompt": "x", "text": "mine", "input_text": "too", "error": 1}
    found = answered(read, line)
    assert (found["text"], found["input_input_text"], found["input_text"], found["input_error"]) == (
        "Hi",
        "mine",
        "too",
        1,
    )
    assert "error" not in found


@pytest.mark.parametrize(
    "name", [*FOREIGN, "max_token", "Max-Tokens", "temprature", "message", "stops", "topp", "tool"]
)
def test_a_slip_is_refused_and_says_what_was_meant(read: Callable[..., list[Any]], name: str) -> None:
    (row,) = read(json.dumps({"prompt": "x", name: 1}).encode())
    assert isinstance(row, RowFailure)
    assert (row.code, row.param) == ("unknown_parameter", name)
    assert "did you mean" in row.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-9, 9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(own=st.dictionaries(st.text(max_size=8).map("own column {}".format), json_values, max_size=4))
def test_whatever_a_field_holds_comes_back_as_it_was(own: dict[str, Any], read: Callable[..., list[Any]]) -> None:
    (row,) = read(json.dumps({"id": "a", "prompt": "x", **own}).encode())
    assert isinstance(row, Row)
    found = json.loads(ANSWERS.answer(row, DONE))
    assert {name: found[name] for name in own} == own


ADVICE = {
    "text": "--prompt-column text",
    "instruction,input,output": "--prompt '{{ instruction }}",
    "conversations": "ShareGPT",
    "review": "--prompt-column review",
    "ticket,review": "--prompt-column NAME, one of ticket, review",
    "": "an empty object",
}


@pytest.mark.parametrize("names", ADVICE)
def test_rows_of_common_data_sets_are_told_the_smallest_change(read: Callable[..., list[Any]], names: str) -> None:
    (row,) = read(json.dumps(dict.fromkeys(filter(None, names.split(",")), "x")).encode())
    assert row.code == "not_a_row"
    assert ADVICE[names] in row.message
