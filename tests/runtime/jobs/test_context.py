"""Case I10 of the failure table: a row that does not fit is an error with its numbers, never cut."""

from collections.abc import Callable
from typing import Any

import pytest

from moedge.runtime.jobs.encode import context_error
from moedge.runtime.rows.failure import ErrorCode, Severity


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
