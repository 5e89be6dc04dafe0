"""The expected number of wanted experts is what independent choices give."""

import random

import pytest

from moedge.moe.expected_rows import expected_union


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_it_is_the_mean_over_random_choices(tokens: int) -> None:
    rng, count, per_token = random.Random(0), 16, 2
    draws = [len({rng.randrange(count) for _ in range(tokens * per_token)}) for _ in range(4000)]
    # Choices with replacement: each of tokens * per_token draws is a token of its own with one expert.
    assert expected_union(tokens * per_token, 1, count) == pytest.approx(sum(draws) / len(draws), rel=0.02)


def test_one_token_wants_its_own_and_many_want_all() -> None:
    assert expected_union(1, 8, 64) == pytest.approx(8)
    assert expected_union(1e6, 8, 64) == pytest.approx(64)
