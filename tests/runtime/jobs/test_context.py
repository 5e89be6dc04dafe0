"""Case I10 of the failure table: a row that does not fit is an error with its numbers, never cut
(`runtime/jobs/encode.py`).
"""

from collections.abc import Callable
from typing import Any

import pytest

from moedge.runtime.jobs.encode import RowEncoder, context_error
from moedge.runtime.rows.row import ErrorCode, RowFailure, Severity
from support.jobs.fake_engine import FakeTokenizer


@pytest.mark.parametrize("max_tokens", [1, 7, 100])
def test_i10_a_row_fits_up_to_the_last_token_of_the_context(short: Callable[..., Any], max_tokens: int) -> None:
    row = short(prompt="a", max_tokens=max_tokens)
    for context in range(max_tokens, 200):
        for spare in range(-2, 3):
            error = context_error(row, context - max_tokens - spare, context)
            assert (error is None) is (spare >= 0)


def test_i10_the_error_carries_both_numbers(short: Callable[..., Any]) -> None:
    error = context_error(short(prompt="a", max_tokens=100), 4_000, 4_096)
    assert error is not None
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert error.code.severity is Severity.ROW
    assert all(number in error.message for number in ("4000", "100", "4100", "4096"))


def test_only_a_row_that_memory_refuses_may_be_answered_later(short: Callable[..., Any]) -> None:
    encoder = RowEncoder(FakeTokenizer(), vocab=256, context=100, cache_tokens=50)  # type: ignore[arg-type]
    codes = {}
    for num_prompt in (40, 60, 120):
        failure = encoder.encode(short(prompt="a" * num_prompt, max_tokens=5))
        codes[num_prompt] = failure.code if isinstance(failure, RowFailure) else None
    assert codes == {40: None, 60: ErrorCode.KV_CACHE_EXCEEDED, 120: ErrorCode.CONTEXT_LENGTH_EXCEEDED}
    assert ErrorCode.KV_CACHE_EXCEEDED.may_change
    assert not ErrorCode.CONTEXT_LENGTH_EXCEEDED.may_change, "the model stays as it is"
    assert ErrorCode.KV_CACHE_EXCEEDED.severity is Severity.ROW
