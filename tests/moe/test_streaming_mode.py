"""Modes follow from counts and idle times: everything where nearly all is wanted, what is wanted where little is."""

import numpy as np
import pytest

from moedge.moe.expected_rows import expected_union, wanted_by
from moedge.moe.routing_stats import RoutingStats
from moedge.moe.streaming_mode import Mode, RouterLatency, Waits, choose_mode, guess_savings, num_guesses

E, A = 64, 8


def even() -> RoutingStats:
    stats = RoutingStats({0: E})
    stats.count(0, 1000, [1000 * A // E] * E)
    return stats


@pytest.mark.parametrize(("tokens", "mode"), [(1, Mode.WANTED), (8, Mode.WANTED), (64, Mode.ALL), (512, Mode.ALL)])
def test_the_mode_follows_from_how_much_is_wanted(tokens: int, mode: Mode) -> None:
    assert choose_mode(even(), 0, tokens, set(), Waits(2.0, 9.0), precision=0.0) is mode


def test_a_long_wait_for_routers_makes_reading_everything_cheaper() -> None:
    stats = even()
    assert choose_mode(stats, 0, 16, set(), Waits(1.0, 9.0), precision=0.0) is Mode.WANTED
    assert choose_mode(stats, 0, 16, set(), Waits(20.0, 9.0), precision=0.0) is Mode.ALL


def test_guesses_are_used_where_they_are_good_enough() -> None:
    stats = even()
    assert choose_mode(stats, 0, 1, set(), Waits(3.0, 9.0), precision=0.8) is Mode.FORECAST
    assert choose_mode(stats, 0, 1, set(), Waits(3.0, 9.0), precision=0.1) is Mode.WANTED
    assert choose_mode(stats, 0, 1, set(), Waits(3.0, 9.0), precision=0.0) is Mode.WANTED, "nothing is known yet"
    assert 2.5 < guess_savings(3.0, 9.0, 1.0) < 3.0
    assert guess_savings(0.5, 9.0, 0.0) < -(num_guesses(0.5) - 0.5)
    assert choose_mode(stats, 0, 1, set(), Waits(3.0, 0.1), precision=0.8) is Mode.WANTED, "compute does not wait"


def test_what_was_measured_corrects_what_was_expected() -> None:
    """Tokens whose choices are correlated: 30 of them want as few experts as two."""
    stats = even()
    assert choose_mode(stats, 0, 30, set(), Waits(2.0, 9.0), 0.0) is Mode.ALL
    for _ in range(60):
        stats.observe_union(0, 30, 2 * A)
    assert choose_mode(stats, 0, 30, set(), Waits(2.0, 9.0), 0.0) is Mode.WANTED
    assert stats.layers[0].wanted_by(30).sum() == pytest.approx(expected_union(30, A, E), rel=1e-6)


def test_few_popular_experts_are_wanted_together_by_many_tokens() -> None:
    popularity = RoutingStats({0: E, 1: E})
    popularity.count(0, 1000, [1000 * A // E] * E)
    popularity.count(1, 1000, [1000 * A // 16] * 16 + [0] * (E - 16))
    usual, skewed = (popularity.layers[layer].wanted_by(16).mean() for layer in (0, 1))
    assert usual == pytest.approx(wanted_by(16, A / E), rel=1e-3)
    assert skewed < 0.3


def test_idle_time_is_measured_in_times_that_an_expert_takes_by_size_of_pass() -> None:
    now, waited = [0.0], [0.0]
    latency = RouterLatency(lambda: 2.0, lambda: 1000, lambda: waited[0], 100, clock=lambda: now[0])
    assert latency.seconds_each == 0.2
    assert latency.mean(1) == Waits(2.0, 2.0), "before anything was measured"
    for tokens, seconds in ((1, 0.1), (100, 1.0)):
        latency.begin()
        now[0] += seconds
        waited[0] += 2 * seconds
        latency.end(tokens, guessed=False)
        waited[0] += 1.0
        latency.end(tokens, guessed=True)
    assert latency.mean(1) == pytest.approx(Waits(0.5, 1.0))
    latency.end(1, guessed=False, first=True)
    assert latency.mean(1, first=True) == pytest.approx(Waits(5.0, 0.0)), "between passes there is more to do"
    assert latency.mean(1) == pytest.approx(Waits(0.5, 1.0))
    assert latency.mean(120) == pytest.approx(Waits(5.0, 10.0)), (
        "what is waited for in spite of guesses is another matter"
    )


def test_popularity_before_anything_was_observed_is_even() -> None:
    fresh = RoutingStats({3: 4}).layers[3]
    assert np.allclose(fresh.probabilities, 0.25)
    assert RoutingStats({3: 4}).union is None
