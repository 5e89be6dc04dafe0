"""Rows out (`runtime/rows/answer_formats.py`): OpenAI's own types read our answers, and a line depends on nothing but
its row. Case I3 for outputs.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion

from moedge.runtime.rows.answer_formats import Answers, Completion
from moedge.runtime.rows.row import ErrorCode, RowFailure
from moedge.runtime.sampling.params import FinishReason, TokenLogprob

Make = Callable[..., Any]
TOKENS = (("ab", b"ab"), ("c", None), ("c", b"c"), ("d", None), ("\u2028", b"\xe2\x80\xa8"), ("\ufffd", b"\xe2"))
ANSWERS = Answers("some/model", 1_750_000_000, TOKENS.__getitem__)

negatives = st.floats(max_value=0, allow_nan=False)
ids = st.integers(0, len(TOKENS) - 1)
ranked = st.builds(
    TokenLogprob, ids, negatives, st.integers(0, 9), st.lists(st.tuples(ids, negatives), max_size=2).map(tuple)
)
logprobs = st.none() | st.lists(ranked, max_size=3).map(tuple)
completions = st.builds(
    Completion,
    st.text(),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    st.integers(1, 99),
    logprobs,
)


def completion(text: str = "yes", **given: Any) -> Completion:
    return Completion(
        **{"text": text, "token_ids": (1, 2), "finish_reason": FinishReason.STOP, "num_prompt_tokens": 5} | given
    )


def body_of(line: str) -> Any:
    return json.loads(line)["response"]["body"]


@given(st.lists(completions, min_size=2, max_size=2), st.booleans())
def test_openai_types_read_every_answer(chat: Make, complete: Make, done: list[Completion], ids: bool) -> None:
    """`strict` makes pydantic check types instead of converting them."""
    for row, shape in (
        (chat(n=2, logprobs=True, return_token_ids=ids), ChatCompletion),
        (complete(prompt=["a", "b"], logprobs=1, return_token_ids=ids), OpenAICompletion),
    ):
        line = ANSWERS.answer(row, done)
        assert line.isascii()
        assert "\n" not in line
        body = body_of(line)
        answer = shape.model_validate_json(json.dumps(body), strict=True)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [choice.finish_reason for choice in answer.choices] == [item.finish_reason for item in done]
        assert [choice.get("token_ids") for choice in body["choices"]] == [
            list(item.token_ids) if ids else None for item in done
        ]


def test_a_chat_answer_is_openais_batch_line(chat: Make) -> None:
    line = json.loads(ANSWERS.answer(chat(), [completion()]))
    body = line["response"].pop("body")
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert (line["custom_id"], line["response"]["status_code"], line["error"]) == ("c", 200, None)
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "some/model", 1_750_000_000)
    message = {"role": "assistant", "content": "yes", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def test_a_prompt_is_counted_once_however_many_samples_it_has(complete: Make) -> None:
    row = complete(prompt=["a", "b"], n=3)
    done = [completion(num_prompt_tokens=10)] * 3 + [completion(num_prompt_tokens=1)] * 3
    assert body_of(ANSWERS.answer(row, done))["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 12,
        "total_tokens": 23,
    }


def test_logprobs_have_openais_two_shapes(chat: Make, complete: Make) -> None:
    top = ((0, -0.5), (1, -1.0), (2, -3.0), (3, -math.inf))
    done = completion(logprobs=(TokenLogprob(0, -0.5, 1, top), TokenLogprob(1, -2.0, 2, ())))
    (chat_choice,) = body_of(ANSWERS.answer(chat(logprobs=True, top_logprobs=4), [done]))["choices"]
    first, second = chat_choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], second["bytes"], second["top_logprobs"]) == ("ab", [97, 98], None, [])
    assert [item["logprob"] for item in first["top_logprobs"]] == [-0.5, -1.0, -3.0, -9999.0]
    (choice,) = body_of(ANSWERS.answer(complete(logprobs=4), [done]))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"d": -9999.0, "c": -1.0, "ab": -0.5}, {}],
        "text_offset": [0, 2],
    }


def test_i3_nan_never_reaches_the_output(chat: Make) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        ANSWERS.answer(chat(logprobs=True), [completion(logprobs=(TokenLogprob(0, math.nan, 1, ()),))])


def test_i6_line_separators_and_control_characters_survive_as_escapes(chat: Make) -> None:
    text = "\u2028\u0085\0\n\x1b"
    line = ANSWERS.answer(chat(), [completion(text)])
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert body_of(line)["choices"][0]["message"]["content"] == text


def test_a_failed_row_is_reported_as_openai_does(chat: Make) -> None:
    row = chat(echo=True)
    assert isinstance(row, RowFailure)
    line = json.loads(ANSWERS.failure(row))
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("c", None, 400)
    assert line["response"]["body"]["error"] == {
        "message": row.message,
        "type": "invalid_request_error",
        "param": "echo",
        "code": "unsupported_parameter",
    }


def test_short_rows_are_answered_on_one_level(short: Make) -> None:
    cost = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    one = json.loads(ANSWERS.answer(short(id=1, prompt="a"), [completion()]))
    assert one == {"id": "1", "text": "yes", "finish_reason": "stop", "usage": cost}
    row = short(id="2", prompt="a", n=2, return_token_ids=True)
    two = json.loads(ANSWERS.answer(row, [completion(), completion("no", finish_reason=FinishReason.LENGTH)]))
    assert two["choices"] == [
        {"text": "yes", "finish_reason": "stop", "token_ids": [1, 2]},
        {"text": "no", "finish_reason": "length", "token_ids": [1, 2]},
    ]
    assert "text" not in two
    bad = short(id="3", prompt="a", top_p=2)
    assert json.loads(ANSWERS.failure(bad)) == {
        "id": "3",
        "error": {"code": "invalid_value", "message": bad.message, "param": "top_p"},
    }


@given(completions)
def test_the_same_row_is_answered_with_the_same_bytes_by_any_run(chat: Make, short: Make, done: Completion) -> None:
    for row in (chat(), short(prompt="a")):
        assert ANSWERS.answer(row, [done]) == Answers("some/model", 1_750_000_000, TOKENS.__getitem__).answer(
            row, [done]
        )


def test_different_rows_have_different_ids_of_three_kinds(read: Make) -> None:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}} for i in range(50)
    ]
    found = [
        json.loads(ANSWERS.answer(row, [completion()]))
        for row in read(b"\n".join(json.dumps(line).encode() for line in lines))
    ]
    ids = [
        part for line in found for part in (line["id"], line["response"]["request_id"], line["response"]["body"]["id"])
    ]
    assert len({name.rpartition("_")[2].rpartition("-")[2] for name in ids}) == 150


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 400, "invalid_request_error"),
        (ErrorCode.NUMERICAL_ERROR, 500, "server_error"),
    ],
)
def test_a_row_that_fails_while_running_is_not_blamed_for_the_models_fault(
    chat: Make, code: ErrorCode, status: int, kind: str
) -> None:
    row = chat()
    response = json.loads(ANSWERS.failure(row.failure(code, "why")))["response"]
    assert (response["status_code"], response["body"]["error"]["type"]) == (status, kind)


def test_log_probabilities_of_prompts_are_written_as_vllm_does(chat: Make, complete: Make, short: Make) -> None:
    scored = (TokenLogprob(0, -1.5, 3, ((1, -0.5), (0, -1.5))), TokenLogprob(4, -math.inf, 9, ()))
    done = [completion(prompt_logprobs=scored), completion(prompt_logprobs=scored)]
    first = {
        "0": {"logprob": -1.5, "rank": 3, "decoded_token": "ab"},
        "1": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
    }
    wanted = [None, first, {"4": {"logprob": -9999.0, "rank": 9, "decoded_token": "\u2028"}}]
    body = body_of(ANSWERS.answer(chat(n=2, prompt_logprobs=1), done))
    assert body["prompt_logprobs"] == wanted
    ChatCompletion.model_validate_json(json.dumps(body), strict=True)
    body = body_of(ANSWERS.answer(complete(prompt=["a", "b"], prompt_logprobs=1), done))
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [wanted, wanted]
    assert json.loads(ANSWERS.answer(short(prompt="a", n=2, prompt_logprobs=True), done))["prompt_logprobs"] == wanted
    assert "prompt_logprobs" not in json.loads(ANSWERS.answer(short(prompt="a"), [completion()]))
