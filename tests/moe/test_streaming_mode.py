"""Modes follow from counts and idle times: everything where nearly all is wanted, what is wanted where little is."""

import numpy as np
import pytest

from moedge.moe.expected_rows import expected_union, wanted_by
from moedge.moe.routing_stats import Popularity, RoutingStats
from moedge.moe.streaming_mode import Mode, ModeChoice, RouterLatency, Waits, guess_savings, num_guesses

E, A = 64, 8


def choice(forced: Mode | None = None) -> tuple[ModeChoice, RoutingStats]:
    stats = RoutingStats({0: E})
    stats.popularity.observe(0, 1000, [1000 * A // E] * E)
    return ModeChoice(stats, forced), stats


@pytest.mark.parametrize(("tokens", "mode"), [(1, Mode.WANTED), (8, Mode.WANTED), (64, Mode.ALL), (512, Mode.ALL)])
def test_the_mode_follows_from_how_much_is_wanted(tokens: int, mode: Mode) -> None:
    assert choice()[0].choose(0, tokens, set(), Waits(2.0, 9.0), precision=0.0) is mode


def test_a_long_wait_for_routers_makes_reading_everything_cheaper() -> None:
    modes, _ = choice()
    assert modes.choose(0, 16, set(), Waits(1.0, 9.0), precision=0.0) is Mode.WANTED
    assert modes.choose(0, 16, set(), Waits(20.0, 9.0), precision=0.0) is Mode.ALL


def test_guesses_are_used_where_they_are_good_enough() -> None:
    modes, _ = choice()
    assert modes.choose(0, 1, set(), Waits(3.0, 9.0), precision=0.8) is Mode.FORECAST
    assert modes.choose(0, 1, set(), Waits(3.0, 9.0), precision=0.1) is Mode.WANTED
    assert modes.choose(0, 1, set(), Waits(3.0, 9.0), precision=0.0) is Mode.WANTED, "nothing is known of them yet"
    assert 2.5 < guess_savings(3.0, 9.0, 1.0) < 3.0
    assert guess_savings(0.5, 9.0, 0.0) < -(num_guesses(0.5) - 0.5)
    assert modes.choose(0, 1, set(), Waits(3.0, 0.1), precision=0.8) is Mode.WANTED, "compute does not wait anyway"


def test_what_was_measured_corrects_what_was_expected() -> None:
    """Tokens whose choices are correlated: 30 of them want as few experts as two."""
    modes, stats = choice()
    assert modes.choose(0, 30, set(), Waits(2.0, 9.0), 0.0) is Mode.ALL
    for _ in range(60):
        stats.observe_union(0, 30, 2 * A)
    assert modes.choose(0, 30, set(), Waits(2.0, 9.0), 0.0) is Mode.WANTED
    assert stats.popularity.layers[0].wanted_by(30).sum() == pytest.approx(expected_union(30, A, E), rel=1e-6)


def test_few_popular_experts_are_wanted_together_by_many_tokens() -> None:
    popularity = Popularity({0: E, 1: E})
    popularity.observe(0, 1000, [1000 * A // E] * E)
    popularity.observe(1, 1000, [1000 * A // 16] * 16 + [0] * (E - 16))
    even, skewed = (popularity.layers[layer].wanted_by(16).mean() for layer in (0, 1))
    assert even == pytest.approx(wanted_by(16, A / E), rel=1e-3)
    assert skewed < 0.3


def test_a_forced_mode_is_forced() -> None:
    for mode in Mode:
        assert choice(mode)[0].choose(0, 1, set(range(E)), Waits(0.0, 0.0), 0.0) is mode


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
    fresh = Popularity({3: 4}).layers[3]
    assert np.allclose(fresh.probabilities, 0.25)
    assert Popularity({3: 4}).union is None
