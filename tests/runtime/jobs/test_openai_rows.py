"""OpenAI's batch lines (`runtime/rows/row_formats.py`): what they are read as, and which of them refuse the job."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from moedge.runtime.rows.row import (
    ChatPrompt,
    Endpoint,
    ErrorCode,
    Row,
    RowFailure,
    Severity,
    TextPrompt,
    TokenPrompt,
)
from moedge.runtime.sampling.params import SequenceSampling

Make = Callable[..., Any]
TEXT_PART = {"type": "text", "text": "a"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "a"}}
LINE = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}


def test_a_chat_line_with_every_field_becomes_one_row(chat: Make) -> None:
    row = chat(
        model="any", max_completion_tokens=9, temperature=1, top_p=0.5, top_k=-1, min_p=0.1, stop="\n",
        stop_token_ids=[3, 4], seed=5, n=2, logprobs=True, top_logprobs=3, presence_penalty=1,
        frequency_penalty=-1, repetition_penalty=1.5, ignore_eos=True, return_token_ids=True,
    )  # fmt: skip
    params = SequenceSampling(
        max_tokens=9, temperature=1.0, top_p=0.5, top_k=0, min_p=0.1, stop=("\n",), stop_token_ids=(3, 4), seed=5,
        logprobs=3, presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5, ignore_eos=True,
    )  # fmt: skip
    prompt = ChatPrompt(({"role": "user", "content": "Hi"},))
    assert row == Row(0, 1, "c", Endpoint.CHAT, (prompt,), params, 2, "any", True)
    assert type(row.params) is SequenceSampling


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt((1, 2)),)),
        ([[1, 2], [3]], (TokenPrompt((1, 2)), TokenPrompt((3,)))),
    ],
)
def test_a_prompt_has_four_spellings(complete: Make, prompt: Any, prompts: Any) -> None:
    assert complete(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "invalid_value"), ([], "invalid_value"), ([""], "invalid_value"), (["a", ""], "invalid_value"),
        ([[]], "invalid_value"), ([1, "a"], "invalid_type"), (["a", 1], "invalid_type"), (["a", [1]], "invalid_type"),
        ([True], "invalid_type"), ([-1], "invalid_value"), ([1.5], "invalid_type"), (7, "invalid_type"),
        ([1 << 31], "invalid_value"), ({}, "invalid_type"), (["a"] * 2049, "invalid_value"),
        (None, "missing_parameter"),
    ],
)  # fmt: skip
def test_i11_a_prompt_that_is_empty_or_mixed_is_an_error(complete: Make, prompt: Any, code: str) -> None:
    error = complete(prompt=prompt)
    assert (error.code, error.param, error.code.severity) == (code, "prompt", Severity.ROW)


def test_logprobs_is_a_number_for_completions_and_a_flag_for_chat(chat: Make, complete: Make) -> None:
    assert [complete(logprobs=count).params.logprobs for count in (None, 0, 5)] == [None, 0, 5]
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None
    assert chat(top_logprobs=2).param == "top_logprobs"
    assert complete(logprobs=True).code is ErrorCode.INVALID_TYPE
    assert chat(logprobs=2).code is ErrorCode.INVALID_TYPE


def test_both_names_of_max_tokens_must_agree(chat: Make) -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).code is ErrorCode.INVALID_VALUE


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"body": None}, "not_a_row"), ({"body": []}, "not_a_row"), ({"method": "GET"}, "not_a_row"),
        ({"method": None}, "not_a_row"), ({"url": None}, "not_a_row"), ({"url": ["/v1/completions"]}, "not_a_row"),
        ({"url": "/v1/embeddings"}, "unknown_url"), ({"url": "/v1/completions/"}, "unknown_url"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_call_refuses_the_job(read: Make, change: dict[str, Any], code: str) -> None:
    (row,) = read(json.dumps(LINE | change).encode())
    assert row.code == code
    assert row.code.severity is Severity.LINE
    assert row.id == "c"


def test_an_unknown_key_beside_the_body_is_an_error_of_the_row_unless_it_is_a_note(read: Make) -> None:
    bad, good = read(
        b"\n".join(json.dumps(LINE | more).encode() for more in ({"prompt": "a"}, {"x-note": 1, "custom_id": "d"}))
    )
    assert bad.code is ErrorCode.UNKNOWN_PARAMETER
    assert bad.code.severity is Severity.ROW
    assert isinstance(good, Row)


def test_prompts_times_samples_are_bounded(complete: Make) -> None:
    assert complete(prompt=["a"] * 1024, n=2).num_samples == 2
    assert complete(prompt=["a"] * 1025, n=2).param == "n"


def test_choices_come_prompt_by_prompt_with_seeds_of_their_own(complete: Make) -> None:
    choices = list(complete(prompt=["a", "b"], n=3, seed=11).choices())
    assert [prompt for prompt, _ in choices] == [0, 0, 0, 1, 1, 1]
    seeds = [params.seed for _, params in choices]
    assert seeds[0] == 11
    assert len(set(seeds)) == 6


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "", "name": "Ann"}, {"role": "user", "content": ""}),
        ({"role": "user", "content": [TEXT_PART, TEXT_PART]}, {"role": "user", "content": "a\na"}),
        (
            {"role": "assistant", "content": "x", "refusal": None, "annotations": []},
            {"role": "assistant", "content": "x"},
        ),
        ({"role": "user", "content": "<|im_end|>{{ 7 * 7 }}"}, {"role": "user", "content": "<|im_end|>{{ 7 * 7 }}"}),
    ],
)  # fmt: skip
def test_i16_messages_are_text_and_stay_as_they_are(chat: Make, message: Any, expected: Mapping[str, str]) -> None:
    assert chat(messages=[message]).prompts == (ChatPrompt((expected,)),)


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("hi", "invalid_type", "messages[0]"),
        ({"content": "x"}, "invalid_value", "messages[0].role"),
        ({"role": "function", "content": "x"}, "invalid_value", "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "invalid_value", "messages[0].role"),
        ({"role": "user"}, "missing_parameter", "messages[0].content"),
        ({"role": "user", "content": []}, "invalid_type", "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "invalid_type", "messages[0].content[0]"),
        ({"role": "user", "content": [TEXT_PART, IMAGE_PART]}, "unsupported_parameter", "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "invalid_type", "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 1}, "invalid_type", "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "invalid_type", "messages[0].tool_calls[0]"),
        ({"role": "user", "content": "x", "colour": 1}, "unknown_parameter", "messages[0].colour"),
    ],
)  # fmt: skip
def test_a_message_that_is_not_text_is_an_error_that_names_its_place(
    chat: Make, message: Any, code: str, param: str
) -> None:
    row = chat(messages=[message])
    assert isinstance(row, RowFailure)
    assert (row.code, row.param) == (code, param)
    assert row.code.severity is Severity.ROW


@pytest.mark.parametrize(
    ("messages", "code"), [([], "invalid_value"), ("hi", "invalid_type"), (None, "missing_parameter")]
)
def test_i11_empty_messages_are_an_error(chat: Make, messages: Any, code: str) -> None:
    assert chat(messages=messages).code == code
