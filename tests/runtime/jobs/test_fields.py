"""Case I11 of the failure table: values out of range, of the wrong type, and fields that do not exist."""

import json
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.rows.fields import FIELDS, IGNORED, UNSUPPORTED
from moedge.runtime.rows.row import ErrorCode, Row, RowFailure, Severity
from moedge.runtime.sampling.params import SequenceSampling

Make = Callable[..., Any]
# The least and the most of every number, and a value just outside on each side.
EDGES = {
    "max_tokens": (1, 2**63 - 1, 0, 2**63),
    "temperature": (0, 1.7e308, -1e-9, 10**309),
    "top_p": (1e-9, 1, 0, 1.001),
    "top_k": (-1, 2**63 - 1, -2, 2**63),
    "min_p": (0, 1, -1e-9, 1.001),
    "repetition_penalty": (1e-9, 1.7e308, 0, 10**309),
    "presence_penalty": (-2, 2, -2.1, 2.1),
    "frequency_penalty": (-2, 2, -2.1, 2.1),
    "seed": (0, 2**63 - 1, -1, 2**63),
    "n": (1, 128, 0, 129),
}


@pytest.mark.parametrize("name", EDGES)
def test_i11_numbers_are_accepted_up_to_their_limits_and_no_further(short: Make, name: str) -> None:
    least, most, below, above = EDGES[name]
    for value in (least, most):
        row = short(prompt="a", **{name: value})
        assert isinstance(row, Row), row
        assert (row.num_samples if name == "n" else getattr(row.params, name)) == (
            0 if value == -1 and name == "top_k" else value
        )
    for value in (below, above):
        error = short(prompt="a", **{name: value})
        assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, name)
        assert f"{name} must be " in error.message


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("value", ["1", True, [1], {}, "NaN"])
def test_i11_a_number_is_nothing_else(short: Make, name: str, value: Any) -> None:
    error = short(prompt="a", **{name: value})
    assert (error.code, error.param) == (ErrorCode.INVALID_TYPE, name)


def test_i11_choices_are_some_different_texts_and_nothing_is_generated_to_them(short: Make, chat: Make) -> None:
    row = short(prompt="a", choices=["b", "c"], max_tokens=7)
    assert (row.scored, row.params.max_tokens) == (("b", "c"), 1)
    for value, code in (("b", "type"), (["b", 1], "type"), ([], "value"), (["b", ""], "value"), (["b", "b"], "value")):
        assert short(prompt="a", choices=value).code == f"invalid_{code}"
    assert short(prompt="a", choices=[str(each) for each in range(2049)]).code is ErrorCode.INVALID_VALUE
    for name, value in (
        ("n", 2),
        ("response_format", {"type": "json_object"}),
        ("prompt_logprobs", 0),
        ("min_tokens", 1),
    ):
        error = short(prompt="a", choices=["b"], **{name: value})
        assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, name)
    assert chat(choices=["b"]).code is ErrorCode.UNSUPPORTED_PARAMETER


@pytest.mark.parametrize("value", [1, [], {}, True])
def test_i11_the_model_is_a_string_and_kept(chat: Make, value: Any) -> None:
    assert chat(model=value).code is ErrorCode.INVALID_TYPE
    assert chat(model="some/model").model == "some/model"


def test_whole_numbers_may_be_written_as_floats(short: Make) -> None:
    row = short(prompt="a", n=2.0, max_tokens=7.0, seed=3.0)
    assert (row.num_samples, row.params.max_tokens, row.params.seed) == (2, 7, 3)
    assert all(type(value) is int for value in (row.num_samples, row.params.max_tokens, row.params.seed))
    assert short(prompt="a", n=1.5).code is ErrorCode.INVALID_TYPE


def test_i11_temperature_nan_is_a_malformed_line(short: Make) -> None:
    assert short(prompt="a", temperature=math.nan).code is ErrorCode.NON_FINITE_NUMBER


@pytest.mark.parametrize("value", [["a"] * 17, [""], "", ["a", 1], 3, {"a": 1}])
def test_i11_stop_is_a_string_or_up_to_sixteen(short: Make, value: Any) -> None:
    assert short(prompt="a", stop=value).param == "stop"
    assert short(prompt="a", stop=["a"] * 16).params.stop == ("a",) * 16
    assert short(prompt="a", stop=[]).params.stop == ()


@pytest.mark.parametrize("name", ["ignore_eos", "return_token_ids"])
@pytest.mark.parametrize("value", [1, 0, "true", []])
def test_i11_a_flag_is_true_or_false(short: Make, name: str, value: Any) -> None:
    assert short(prompt="a", **{name: value}).code is ErrorCode.INVALID_TYPE


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none()))
def test_null_is_absent(chat: Make, body: dict[str, None]) -> None:
    body.pop("messages", None)
    assert chat(**body) == chat()


@pytest.mark.parametrize("name", [*IGNORED, "x-note", "x-"])
@pytest.mark.parametrize("value", ["v", 1, {"a": [1]}])
def test_fields_that_cannot_change_the_answer_change_nothing(chat: Make, name: str, value: Any) -> None:
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fields_that_would_change_the_answer_are_refused_by_name(chat: Make, complete: Make, name: str) -> None:
    for make in (chat, complete):
        error = make(**{name: {"unlike": "any"}})
        assert (error.code, error.param, error.code.severity) == (ErrorCode.UNSUPPORTED_PARAMETER, name, Severity.ROW)
        assert name in error.message
        for value in UNSUPPORTED[name]:
            assert make(**{name: value}) == make()


def test_a_neutral_value_is_compared_with_its_type(chat: Make) -> None:
    assert isinstance(chat(stream=0), RowFailure)
    assert isinstance(chat(best_of=True), RowFailure)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("topp", "top_p"), ("stops", "stop")],
)
def test_i11_an_unknown_field_names_the_nearest_known_one(chat: Make, name: str, meant: str) -> None:
    error = chat(**{name: 1})
    assert error.code is ErrorCode.UNKNOWN_PARAMETER
    assert error.message.endswith(f"did you mean {meant}?")


def test_a_hostile_name_stays_short_and_printable_in_the_message(chat: Make) -> None:
    error = chat(**{"\x1b[31m\u202e" * 1000: 1})
    assert error.message.isprintable()
    assert error.message.isascii()
    assert len(error.message) < 500


def test_a_known_field_of_another_form_is_unsupported_not_unknown(complete: Make) -> None:
    for name in ("messages", "top_logprobs", "max_completion_tokens"):
        assert complete(**{name: 1}).code is ErrorCode.UNSUPPORTED_PARAMETER


def test_every_sampling_parameter_can_be_given_by_a_row() -> None:
    assert {field.name for field in fields(SequenceSampling)} <= set(FIELDS)


def test_the_tables_do_not_overlap() -> None:
    names = [*FIELDS, *IGNORED, *UNSUPPORTED]
    assert len(names) == len(set(names))


def test_absent_fields_take_the_defaults_and_given_ones_do_not(read: Make) -> None:
    data = b"\n".join(
        json.dumps(row).encode() for row in ({"prompt": "a"}, {"prompt": "b", "temperature": 0, "stop": []})
    )
    absent, given_row = read(data, max_tokens=5, temperature=0.9, stop=("x",), min_p=0.2)
    assert (absent.params.max_tokens, absent.params.temperature, absent.params.stop) == (5, 0.9, ("x",))
    assert (given_row.params.temperature, given_row.params.stop, given_row.params.min_p) == (0.0, (), 0.2)
