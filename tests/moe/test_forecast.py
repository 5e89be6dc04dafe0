"""Forecasts (`moe/streaming_order.py`) find what a router that sees the states of the layer before can find, and say
how much that is.
"""

import pytest
import torch

from moedge.moe.expert import group_by_expert
from moedge.moe.routing_stats import RoutingStats
from moedge.moe.streaming_order import ExpertForecast

E, A, D, T = 16, 2, 32, 3


def forecast(router: torch.Tensor | None = None) -> ExpertForecast:
    return ExpertForecast(RoutingStats({0: E, 1: E}), {} if router is None else {1: router})


def play(one: ExpertForecast, generator: torch.Generator, router: torch.Tensor, passes: int = 60) -> float:
    """The share of right guesses over passes whose second layer chooses by `router`."""
    right = made = 0
    for _ in range(passes):
        hidden = torch.randn(T, D, generator=generator)
        guess = one.guess(one.foresee(1, hidden, A), set(), 4)
        wanted = group_by_expert((hidden @ router.T).topk(A, dim=-1).indices, E).wanted
        one.observe(1, wanted)
        right, made = right + len(set(guess) & set(wanted)), made + len(guess)
    return right / made


def test_a_router_that_sees_the_same_states_is_foreseen() -> None:
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(E, D, generator=generator)
    one = forecast(router)
    assert play(one, generator, router) > 0.9
    assert one.precision(1) > 0.9


def test_where_nothing_can_be_foreseen_the_precision_says_so() -> None:
    generator = torch.Generator().manual_seed(1)
    one = forecast(torch.randn(E, D, generator=generator))
    play(one, generator, torch.randn(E, D, generator=generator), 100)
    assert 0.0 < one.precision(1) < 0.6
    assert forecast().precision(1) == 0.0


def test_held_experts_are_not_guessed_and_without_a_router_nothing_is() -> None:
    one = forecast(torch.randn(E, D))
    assert set(one.guess(one.foresee(1, torch.randn(8, D), E), set(range(E - 3)), 8)) == {E - 3, E - 2, E - 1}
    assert forecast().foresee(1, torch.randn(1, D), A) == ()
    assert forecast(torch.randn(E, D + 1)).foresee(1, torch.randn(1, D), A) == (), "states of another width"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_comes_to_the_host_with_the_ids_is_what_was_foreseen(dtype: torch.dtype) -> None:
    """Of the most experts and with ids of either type: both cross as float32."""
    most = 1 << 16
    one = forecast(torch.randn(E, D))
    ids = torch.randint(most - 9, most, (T, A), dtype=dtype)
    foreseen = one.foresee(1, torch.randn(T, D), A)
    groups, alone = group_by_expert(ids, most, foreseen), group_by_expert(ids, most)
    assert groups.counts == alone.counts
    assert torch.equal(groups.token_ids, alone.token_ids)
    assert all(torch.equal(came, sent.flatten().float()) for came, sent in zip(groups.foreseen, foreseen, strict=True))
    assert one.guess(groups.foreseen, {0, 3}, 4) == one.guess(foreseen, {0, 3}, 4) != []
    assert alone.foreseen == ()


def test_counts_tell_right_guesses_from_wasted_ones() -> None:
    one = forecast()
    one.count({1, 2, 3}, {2, 3, 4, 5}, idle=2.0)
    assert (one.counts.issued, one.counts.used, one.counts.misses) == (3, 2, 4)
    assert one.counts.saved == 2.0 - 1.0, "two fitted the idle time, the wrong one did not"
