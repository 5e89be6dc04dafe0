"""Exact hit counts of the policy that keeps popular experts (`moe/expert_cache.py`) on traces: a scan, a skew that
moves, sizes that differ.
"""

import itertools
import random

import numpy as np
import pytest

from moedge.moe.expert_cache import Popular
from moedge.offload.stream.stream import ShardKey
from support.experts.replay import Trace, belady, replay

LAYERS, EXPERTS = 4, 8
KEYS = [ShardKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def popular(held: list[ShardKey]) -> Popular:
    return Popular(held, dict.fromkeys(range(LAYERS), 1), {layer: np.full(EXPERTS, 0.25) for layer in range(LAYERS)})


@pytest.mark.parametrize("num_slots", [4, 8, 16, 24])
def test_on_a_scan_popular_hits_its_share(num_slots: int) -> None:
    passes = 50
    trace: Trace = [list(range(EXPERTS))] * (LAYERS * passes)
    assert replay(trace, LAYERS, popular(KEYS[:num_slots]), KEYS[:num_slots]) == passes * num_slots
    assert belady(trace, LAYERS, KEYS[:num_slots]) >= passes * num_slots


def skewed(seed: int, passes: int, favourites: list[int]) -> Trace:
    rng = random.Random(seed)
    weights = [8.0 if expert in favourites else 1.0 for expert in range(EXPERTS)]
    return [sorted(set(rng.choices(range(EXPERTS), weights, k=2))) for _ in range(passes * LAYERS)]


def test_popular_learns_what_is_popular_and_follows_when_it_changes() -> None:
    """The slots begin with the wrong experts; half way others become popular."""
    before, after = skewed(1, 150, [6, 7]), skewed(2, 150, [0, 1])
    worst = [key for key in KEYS if key.expert in (2, 3)]
    policy = popular(worst)
    hits = replay([*before, *after], LAYERS, policy, worst)
    fixed = sum(expert in (2, 3) for wanted in (*before, *after) for expert in wanted)
    best = sum(expert in (6, 7) for wanted in before for expert in wanted)
    best += sum(expert in (0, 1) for wanted in after for expert in wanted)
    assert fixed < 0.2 * best
    assert hits > 0.8 * best
    assert hits <= belady([*before, *after], LAYERS, worst)


def test_the_hit_counts_of_a_recorded_trace_are_exact() -> None:
    """Numbers, so that no change of a policy goes unseen."""
    trace, held = skewed(7, 60, [1, 5, 6]), KEYS[:8]
    assert replay(trace, LAYERS, popular(held), held) == 213
    assert belady(trace, LAYERS, held) == 276


def test_a_slot_goes_only_to_an_expert_of_its_size() -> None:
    sizes = {0: 1, 1: 2}
    held = [ShardKey(0, 0), ShardKey(1, 0)]
    policy = Popular(held, sizes, {0: np.zeros(4), 1: np.zeros(4)})
    for _ in range(10):
        policy.begin_pass()
        policy.observe(1, [3])
    assert policy.victim(ShardKey(1, 3), lambda _: True) == ShardKey(1, 0)


def test_chance_does_not_move_slots() -> None:
    """Hysteresis: where all are equally popular, it leaves the slots as they are, though every pass wants others."""
    trace, held = skewed(3, 400, []), KEYS[:16]
    policy, swaps = popular(held), 0
    for turn, wanted in enumerate(trace):
        if turn % LAYERS == 0:
            policy.begin_pass()
        policy.observe(turn % LAYERS, wanted)
        swaps += sum(policy.victim(ShardKey(turn % LAYERS, expert), lambda _: True) is not None for expert in wanted)
    assert swaps < 0.1 * len(list(itertools.chain(*trace)))


def test_what_may_not_leave_stays() -> None:
    policy = popular([ShardKey(0, 0), ShardKey(0, 1)])
    for _ in range(30):
        policy.begin_pass()
        policy.observe(0, [7])
    assert policy.victim(ShardKey(0, 7), lambda key: False) is None
    assert policy.victim(ShardKey(0, 7), lambda key: key.expert == 1) == ShardKey(0, 1)
