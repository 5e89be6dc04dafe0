"""Each numeric setting of sampling has a range that holds its default, and nothing outside is taken
(`runtime/sampling/params.py`).
"""

import dataclasses
import math

import pytest

from moedge.runtime.sampling.params import LIMITS, SequenceSampling

ACCEPTED = {
    "max_tokens": [1, 10**6],
    "temperature": [0, 0.0, 0.7, 2.0, 100.0],
    "top_k": [0, 1, 10**6],
    "top_p": [1e-9, 0.5, 1, 1.0],
    "min_p": [0.0, 0.1, 1.0],
    "repetition_penalty": [1e-9, 1.0, 10.0],
    "presence_penalty": [-2.0, 0.0, 2.0],
    "frequency_penalty": [-2.0, 0.0, 2.0],
    "seed": [0, 2**63 - 1],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "logprob_start_len": [0, 10**6],
    "logit_bias": [-100, 0.5, 100],
    "min_tokens": [0, 10**6],
    "max_thinking_tokens": [0, 10**6],
}
REFUSED = {
    "max_tokens": [0, -1],
    "temperature": [-0.1],
    "top_k": [-1],
    "top_p": [0.0, -0.1, 1.1],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0.0, -1.0],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "seed": [-1, 2**63],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "logprob_start_len": [-1],
    "logit_bias": [-100.1, 101],
    "min_tokens": [-1],
    "max_thinking_tokens": [-1],
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_holds_its_range_and_no_more(name):
    assert all(value in LIMITS[name] for value in ACCEPTED[name])
    assert not any(value in LIMITS[name] for value in REFUSED[name])
    assert not any(value in LIMITS[name] for value in (math.nan, math.inf, -math.inf))


def test_every_numeric_setting_has_a_limit_that_holds_its_default():
    fields = dataclasses.fields(SequenceSampling)
    numeric = {field.name for field in fields if field.type in ("int", "float", "int | None")}
    # The values of a bias are numbers, the setting is none.
    assert numeric == set(LIMITS) - {"logit_bias"}
    defaults = {field.name: field.default for field in fields if field.name in numeric}
    given = {name: value for name, value in defaults.items() if isinstance(value, int | float)}
    assert all(value in LIMITS[name] for name, value in given.items())


def test_a_limit_reads_as_the_end_of_a_sentence():
    assert str(LIMITS["top_p"]) == "above 0 and at most 1"
    assert str(LIMITS["temperature"]) == "at least 0"
    assert str(LIMITS["presence_penalty"]) == "at least -2 and at most 2"
