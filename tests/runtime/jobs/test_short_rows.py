"""Short rows (`runtime/rows/row_formats.py`): prompt or messages and sampling fields on one level."""

from collections.abc import Callable
from typing import Any

import pytest

from moedge.runtime.rows.row import ChatPrompt, Endpoint, ErrorCode, Severity, TextPrompt, TokenPrompt

Make = Callable[..., Any]


def test_a_prompt_is_continued_and_messages_are_a_chat(short: Make) -> None:
    assert short(prompt="a").prompts == (TextPrompt("a"),)
    assert short(prompt=[5, 6]).prompts == (TokenPrompt((5, 6)),)
    message = {"role": "user", "content": "a"}
    assert short(messages=[message]).prompts == (ChatPrompt((message,)),)
    assert short(prompt="a").endpoint is Endpoint.SHORT


def test_sampling_fields_have_the_names_of_the_batch_form(short: Make) -> None:
    row = short(id="i", prompt="a", max_tokens=3, temperature=2, stop=["x"], n=4, return_token_ids=True)
    assert (row.id, row.num_samples, row.return_token_ids) == ("i", 4, True)
    assert (row.params.max_tokens, row.params.temperature, row.params.stop) == (3, 2.0, ("x",))


def test_a_whole_number_is_an_id(short: Make) -> None:
    assert short(id=17, prompt="a").id == "17"
    for value in (True, 1.0, [], ""):
        assert short(id=value, prompt="a").code is ErrorCode.INVALID_ID


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "invalid_value", "messages"),
        ({"prompt": ["a"]}, "invalid_type", "prompt"),
        ({"prompt": [[1]]}, "invalid_type", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": None}, "missing_parameter", "messages"),
        ({"prompt": "a", "logprobs": 1}, "unsupported_parameter", "logprobs"),
        ({"prompt": "a", "model": "m"}, "unsupported_parameter", "model"),
        ({"prompt": "a", "promt": "a"}, "unknown_parameter", "promt"),
    ],
)
def test_what_a_short_row_cannot_say_is_an_error_of_the_row(
    short: Make, line: dict[str, Any], code: str, param: str
) -> None:
    error = short(**line)
    assert (error.code, error.param, error.code.severity) == (code, param, Severity.ROW)


@pytest.mark.parametrize("line", [{}, {"id": "a"}, {"text": "a"}, {"custom_id": "a", "prompt": "b"}])
def test_a_line_of_neither_form_refuses_the_job(short: Make, line: dict[str, Any]) -> None:
    error = short(**line)
    assert error.code is ErrorCode.NOT_A_ROW
    assert error.code.severity is Severity.LINE
