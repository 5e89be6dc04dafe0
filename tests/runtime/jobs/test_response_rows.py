"""Batch lines for `/v1/responses` (`runtime/rows/responses.py`): which chat each one is, and what it may not say; and
their answers as rows of a table.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.runtime.jobs.outputs import records
from moedge.runtime.rows.answer_formats import Answers, Completion
from moedge.runtime.rows.fields import IGNORED
from moedge.runtime.rows.responses import RESPONSE_FIELDS, RESPONSE_IGNORED, RESPONSE_UNSUPPORTED, SHARED
from moedge.runtime.rows.row import ErrorCode, Row, RowFailure, Severity
from moedge.runtime.sampling.params import FinishReason
from moedge.runtime.text.messages import FunctionCall

Read = Callable[..., list[Any]]
USER = {"role": "user", "content": "Hi"}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "f",
    "arguments": '{"a": 1}',
    "status": "completed",
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]}
FORM = {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


@pytest.fixture
def response(read: Read) -> Callable[..., Any]:
    def make(**body: Any) -> Row | RowFailure:
        line = {"custom_id": "c", "method": "POST", "url": "/v1/responses", "body": {"input": "Hi", **body}}
        (row,) = read(json.dumps(line).encode())
        return row  # type: ignore[no-any-return]

    return make


def test_a_response_is_the_row_of_the_chat_that_asks_for_the_same(response: Any, chat: Any) -> None:
    own: dict[str, Any] = {
        "model": "any", "temperature": 1, "top_p": 0.5, "top_k": 3, "seed": 5, "stop_token_ids": [3],
        "ignore_eos": True, "presence_penalty": 1, "logit_bias": {"3": 1}, "chat_template_kwargs": {"a": 1},
        "max_thinking_tokens": 4, "metadata": {"a": "b"}, "user": "u",
    }  # fmt: skip
    for here, there in (
        (own | {"max_output_tokens": 9}, own | {"max_completion_tokens": 9}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": FORM}},
            {"response_format": {"type": "json_schema", "json_schema": {k: FORM[k] for k in ("name", "schema")}}},
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {
                "tools": [{"type": "function", "function": {k: TOOL[k] for k in ("name", "parameters", "strict")}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
        ({"store": False, "stream": False, "background": False, "truncation": "disabled", "prompt": None}, {}),
        ({"instructions": "Be.", "input": [USER]}, {"messages": [{"role": "system", "content": "Be."}, USER]}),
    ):
        found, same = response(**here), chat(**there)
        assert isinstance(found, Row), found
        for name in ("prompts", "params", "num_samples", "model", "schema"):
            assert getattr(found, name) == getattr(same, name), name


def test_the_items_of_one_answer_are_one_message(response: Any) -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
    tool = {"role": "tool", "content": "4", "tool_call_id": "c1"}
    answer = {"role": "assistant", "content": "Yes."}
    for items, messages in (
        ([USER, THOUGHT, SAID, CALL, CALL, OUTPUT, OUTPUT],
         [USER, answer | {"reasoning_content": "Hm.", "tool_calls": [call, call]}, tool, tool]),
        ([USER, CALL, OUTPUT, THOUGHT, CALL],
         [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, tool,
          {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}]),
        ([SAID, SAID, USER], [answer, answer, USER]),
        ([{"role": "assistant", "content": ""}, SAID], [answer | {"content": ""}, answer]),
        ([{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": x} for x in "ab"]}],
         [{"role": "system", "content": "a\nb"}]),
    ):  # fmt: skip
        row = response(input=items)
        assert isinstance(row, Row), row
        assert list(row.prompts[0].messages) == messages  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": 3}, "invalid_type", "input"),
        ({"input": [3]}, "invalid_type", "input[0]"),
        ({"input": [{"content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": [USER, {"role": "user", "content": [{"type": "input_file"}]}]}, "unsupported_parameter",
         "input[1].content[0]"),
        ({"input": [USER | {"shape": 1}]}, "unknown_parameter", "input[0].shape"),
        ({"input": [CALL | {"name": None}]}, "invalid_type", "input[0].name"),
        ({"input": [CALL | {"arguments": "[]"}]}, "invalid_value", "input[0].arguments"),
        ({"input": [CALL | {"shape": 1}]}, "unknown_parameter", "input[0].shape"),
        ({"input": [OUTPUT | {"output": None}]}, "missing_parameter", "input[0].output"),
        ({"input": [THOUGHT | {"encrypted_content": "x"}]}, "unsupported_parameter", "input[0].encrypted_content"),
        ({"input": [THOUGHT | {"content": [3]}]}, "invalid_type", "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "unsupported_parameter", "input[0].type"),
        ({"instructions": 3}, "invalid_type", "instructions"),
        ({"text": 3}, "invalid_type", "text"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
        ({"text": {"shape": 1}}, "unknown_parameter", "text.shape"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        ({"text": {"format": FORM | {"schema": {"not": {}}}}}, "invalid_json_schema", "text.format"),
        ({"tools": [{"type": "mcp"}]}, "unsupported_parameter", "tools[0]"),
        ({"tools": [3]}, "invalid_type", "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "invalid_value", "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "unsupported_parameter", "parallel_tool_calls"),
        ({"tools": [TOOL], "text": {"format": FORM}}, "invalid_value", "tools"),
        ({"include": "x"}, "invalid_type", "include"),
        ({"min_tokens": 9, "max_output_tokens": 3}, "invalid_value", "min_tokens"),
        ({"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}}, "invalid_value",
         "reasoning.effort"),
        ({"max_output_token": 3}, "unknown_parameter", "max_output_token"),
        ({"response_format": {"type": "text"}}, "unknown_parameter", "response_format"),
        ({"n": 2}, "unknown_parameter", "n"),
        *(({name: True}, "unsupported_parameter", name) for name in RESPONSE_UNSUPPORTED),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_an_error_of_the_row_with_the_field(
    response: Any, body: Any, code: str, param: str
) -> None:
    error = response(**body)
    assert (error.code, error.param, error.code.severity) == (code, param, Severity.ROW)
    assert not re.search(r"\b(max_tokens|response_format)\b", error.message) or param == "response_format"


def test_a_form_that_was_not_mentioned_is_the_job_s(read: Read) -> None:
    body = {"input": "Hi", "text": {}}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/responses", "body": body}
    plain = line | {"custom_id": "d", "body": body | {"text": {"format": {"type": "text"}}}}
    found = read(b"\n".join(json.dumps(each).encode() for each in (line, plain)), schema='{"type":"object"}')
    assert [row.schema for row in found] == ['{"type":"object"}', None]


def test_a_table_has_the_same_row_for_a_response_and_its_chat(response: Any, chat: Any) -> None:
    answers = Answers("m", 0, lambda token_id: ("", None))
    done = Completion("Yes.", (1, 2), FinishReason.LENGTH, 5)
    thought = Completion("", (1, 2), FinishReason.LENGTH, 5, reasoning="Hm.", reasoning_tokens=2, answered=False)
    called = Completion("", (1,), FinishReason.TOOL_CALLS, 5, calls=(FunctionCall("f", "{}"),))
    for completion in (done, thought, called, Completion('{"a": 1}', (1,), FinishReason.STOP, 5)):
        for metadata in ({}, {"metadata": {"a": "b"}}):
            (found,), (same,) = (
                list(records(answers.answer(row, [completion]), ("a",)))
                for row in (response(**metadata), chat(**metadata))
            )
            assert found == same
    failed = response(store=True)
    assert failed.code is ErrorCode.UNSUPPORTED_PARAMETER
    [error] = records(answers.failure(failed), None)
    assert error["error"].startswith("unsupported_parameter: store")


def test_the_page_lists_the_fields_of_responses() -> None:
    page = (Path(__file__).parents[3] / "docs" / "batches.md").read_text()
    section = page.partition("\n### Responses\n")[2].partition("\n### ")[0]
    own, shared, unsupported = (
        re.findall(r"`([a-z_]+)`", section.partition(f"\n{start}")[2].partition("\n\n")[0])
        for start in ("| Field |", "As of a chat", "Not supported")
    )
    assert set(RESPONSE_FIELDS) - set(SHARED) <= set(own)
    assert shared == list(SHARED)
    assert set(unsupported) == set(RESPONSE_UNSUPPORTED)
    assert set(RESPONSE_IGNORED) == set(IGNORED) - {"store"}
