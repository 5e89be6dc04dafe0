"""Forecasts find what there is to find: routers that see the same states, choices that follow choices, favourites."""

import torch

from moedge.moe.forecast import AFFINITY, LOOK_AHEAD, POPULARITY, Forecast, LookAhead
from moedge.moe.groups import group_by_expert
from moedge.moe.routing_stats import Affinity, RoutingStats

E, A, D, T = 16, 2, 32, 3


def forecast(router: torch.Tensor | None = None) -> Forecast:
    counts = {0: E, 1: E}
    return Forecast(RoutingStats(counts), LookAhead({} if router is None else {1: router}))


def routed(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(A, dim=-1).indices


def play(one: Forecast, generator: torch.Generator, follows: str, router: torch.Tensor, passes: int = 60) -> float:
    """Precision at the end, over passes in which the second layer's choices follow from `follows`."""
    shift, right, made = torch.randperm(E, generator=generator), 0, 0
    for turn in range(passes):
        hidden = torch.randn(T, D, generator=generator)
        first = routed(torch.randn(T, E, generator=generator))
        chosen = {
            "states": lambda hidden=hidden: routed(hidden @ router.T),
            "choices": lambda first=first: shift[first],
            "favourites": lambda: torch.tensor([[3, 5]] * T),
            "nothing": lambda: routed(torch.randn(T, E, generator=generator)),
        }[follows]()
        groups = group_by_expert(first, E)
        guess = one.guess(1, groups, hidden, set(), 4)
        one.stats.observe(0, groups)
        after = group_by_expert(chosen, E)
        one.observe(1, after.wanted)
        one.stats.observe(1, after)
        if turn >= passes // 2:
            right, made = right + len(set(guess) & set(after.wanted)), made + len(guess)
    return right / made


def test_each_way_is_found_where_it_is_the_best() -> None:
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(E, D, generator=generator)
    for follows, way, least in (("states", LOOK_AHEAD, 0.9), ("choices", AFFINITY, 0.8)):
        one = forecast(router)
        assert play(one, generator, follows, router) > least
        assert one.best == way
    one = forecast()
    assert play(one, generator, "favourites", router) >= 0.5, "two favourites among four guesses"


def test_where_nothing_can_be_foreseen_the_precision_says_so() -> None:
    generator = torch.Generator().manual_seed(1)
    router = torch.randn(E, D, generator=generator)
    one = forecast(router)
    play(one, generator, "nothing", router, 100)
    assert one.precision(1) < 0.6
    assert forecast().precision(1) == 0.0
    assert forecast().best is None


def test_held_experts_are_not_guessed_and_another_pass_knows_no_states() -> None:
    one = forecast(torch.randn(E, D))
    groups = group_by_expert(torch.tensor([[0, 1]]), E)
    guess = one.guess(1, groups, torch.randn(1, D), set(range(E - 3)), 8)
    assert set(guess) <= {E - 3, E - 2, E - 1}
    assert one._guesses.keys() == {LOOK_AHEAD, AFFINITY, POPULARITY}
    one.guess(0, groups, None, set(), 4)
    assert one._guesses.keys() == {POPULARITY}


def test_counts_tell_right_guesses_from_wasted_ones() -> None:
    one = forecast()
    one.count({1, 2, 3}, {2, 3, 4, 5}, idle=2.0)
    assert (one.counts.issued, one.counts.used, one.counts.misses) == (3, 2, 4)
    assert one.counts.saved == 2.0 - 1.0, "two fitted the idle time, the wrong one did not"


def test_tables_that_would_be_too_large_are_left_out() -> None:
    assert Affinity.shapes(dict.fromkeys(range(80), 512)) == {}
    assert Affinity.shapes({0: 4, 2: 8}) == {2: (4, 8)}


def test_pairs_are_counted_token_by_token() -> None:
    affinity = Affinity({0: 4, 1: 4})
    affinity.observe(0, torch.tensor([[0, 1], [2, 3]]))
    affinity.observe(1, torch.tensor([[3, 2], [0, 1]]))
    wanted = torch.zeros(4, 4)
    wanted[0, 3] = wanted[0, 2] = wanted[1, 3] = wanted[1, 2] = 1
    wanted[2, 0] = wanted[2, 1] = wanted[3, 0] = wanted[3, 1] = 1
    assert torch.equal(affinity.follows[1], wanted)


def test_popularity_alone_is_counted_where_no_expert_streams() -> None:
    groups = group_by_expert(torch.tensor([[0, 1], [1, 2]]), E)
    whole, alone = RoutingStats({0: E, 1: E}), RoutingStats({0: E, 1: E}, popularity_only=True)
    for stats in (whole, alone):
        for layer in (0, 1):
            stats.observe(layer, groups)
    for layer in (0, 1):
        mine, theirs = alone.popularity.layers[layer], whole.popularity.layers[layer]
        assert mine.chosen.tolist() == theirs.chosen.tolist() == [1.0, 2.0, 1.0, *[0.0] * (E - 3)]
        assert (mine.tokens, mine.passes, mine.unions) == (theirs.tokens, theirs.passes, theirs.unions) == (2.0, 1, 3)
    assert whole.affinity.follows[1].sum() == 8
    assert not alone.affinity.follows[1].any()
