"""Experts are taken by whoever is free, and none loses its place while somebody computes on it."""

import itertools
import random
import threading
import time
from typing import Any

import pytest
import torch

from moedge.moe import expert_cache
from moedge.moe.expert import ExpertBody, OneShotEvent, ResidentExpert, group_by_expert, mix_experts
from moedge.moe.expert_cache import ExpertSlots, Popular, StreamedExperts, StreamingExpertCache
from moedge.moe.routing_stats import RoutingStats
from moedge.moe.streaming_mode import Mode, RouterLatency
from moedge.moe.streaming_order import ExpertFetchQueue, ExpertForecast, StreamingOrder
from moedge.offload.stream.stream import ALIGNMENT, ShardKey
from moedge.quant.matmul.matmul import Matmul, ParallelMatmul, Workspace
from support.experts.instant_lane import InstantLane, number, open_stream, shard

LAYERS, EXPERTS, TOKENS = 3, 8, 4
DELAYS = random.Random(0)


class Bytes(ExpertBody):
    """An expert whose weights are its number over and over; a slow computer looks at them twice."""

    def __init__(self) -> None:
        super().__init__(torch.relu)

    def forward(self, rows: torch.Tensor, weights: Any, compute: Matmul) -> None:
        before = weights.clone()
        time.sleep(DELAYS.uniform(0, 2e-4))
        assert torch.equal(weights, before), "overwritten while somebody computed on it"
        rows.fill_(float(weights[0]))


class Forgetful(Bytes):
    """Says that it is done before it is."""

    def __init__(self, arrived: list[ResidentExpert]) -> None:
        super().__init__()
        object.__setattr__(self, "arrived", arrived)

    def forward(self, rows: torch.Tensor, weights: Any, compute: Matmul) -> None:
        for one in self.arrived:  # type: ignore[attr-defined]
            one.finish()
        super().forward(rows, weights, compute)


class SlotMemory:
    """Slots that hold an expert's number over and over, and `free` ones."""

    def __init__(self, held: list[ShardKey], free: int = 0) -> None:
        self.slots = {key: torch.full((ALIGNMENT,), number(key), dtype=torch.uint8) for key in held}
        self.free = free

    def shard(self, key: ShardKey) -> torch.Tensor:
        return self.slots[key]

    def take(self, entering: ShardKey, view: torch.Tensor) -> torch.Tensor | None:
        if not self.free:
            return None
        self.free -= 1
        self.slots[entering] = view.clone()
        return self.slots[entering]

    def swap(self, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> torch.Tensor:
        self.slots[entering] = self.slots.pop(leaving).copy_(view)
        return self.slots[entering]


def make_cache(ring: int, mode: Mode, num_held: int, free: int = 0) -> tuple[StreamingExpertCache, InstantLane]:
    counts = dict.fromkeys(range(LAYERS), EXPERTS)
    stats = RoutingStats(counts)
    stream, lane = open_stream(ring)
    held = [ShardKey(layer, expert) for layer in range(LAYERS) for expert in range(num_held)]
    sizes = dict.fromkeys(counts, ALIGNMENT)
    probabilities = {layer: one.wanted_by(TOKENS) for layer, one in stats.layers.items()}
    popular = Popular(held, sizes, probabilities)
    slots = ExpertSlots(held, SlotMemory(held, free), lambda key, view: view, popular)  # type: ignore[arg-type, return-value]
    order = StreamingOrder(
        ExpertFetchQueue(stream, shard),
        slots.held,
        ExpertForecast(stats, {}),
        RouterLatency(lambda: 1.0, lambda: ALIGNMENT, lambda: 0.0, ALIGNMENT),
        most_ahead=ring + 1,
        forced=mode,
    )
    return StreamingExpertCache(stats, order, slots), lane


def run(cache: StreamingExpertCache, body: ExpertBody, threads: int, passes: int) -> None:
    """Layers of passes; every assignment must get the number of its expert."""
    compute = ParallelMatmul(Workspace(0), helpers=[Workspace(0) for _ in range(threads - 1)])
    for _ in range(passes):
        for layer in range(LAYERS):
            expert_ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
            weights = torch.rand(TOKENS, 2)
            source = StreamedExperts(layer, EXPERTS, cache)
            out = mix_experts(torch.zeros(TOKENS, 1), expert_ids, weights, source, body, compute)
            wanted = ((16.0 * layer + expert_ids) * weights).sum(1, keepdim=True)
            assert torch.allclose(out, wanted)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("restless", [False, True])
@pytest.mark.parametrize(("ring", "threads"), [(2, 1), (2, 3), (5, 2)])
def test_whoever_is_free_takes_the_next(
    mode: Mode, restless: bool, ring: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restless caches give every expert that arrives a slot, as long as one is left in the pass."""
    if restless:
        monkeypatch.setattr(expert_cache, "_MARGIN", -2.0)
        monkeypatch.setattr(expert_cache, "_SWAP_FRACTION", 1.0)
    cache, _ = make_cache(ring, mode, num_held=2)
    run(cache, Bytes(), threads, passes=20)
    assert cache.counts.fetched > 0
    assert cache.counts.swaps > 0 or not restless


@pytest.mark.parametrize("free", [3, LAYERS * EXPERTS])
def test_experts_that_arrive_take_free_slots_before_any_is_evicted(free: int) -> None:
    """Each is held once, and read once where there are slots for all; every assignment gets its expert."""
    cache, _ = make_cache(2, Mode.WANTED, num_held=1, free=free)
    run(cache, Bytes(), threads=2, passes=20)
    held = [len(cache._slots.held(layer)) for layer in range(LAYERS)]
    assert sum(held) == min(LAYERS + free, LAYERS * EXPERTS)
    if free > 3:
        assert (cache.counts.fetched, cache.counts.swaps) == (LAYERS * (EXPERTS - 1), 0)


def test_a_place_that_is_given_back_too_early_is_noticed() -> None:
    """What the tests above would see if an expert's place went before it was computed."""
    cache, _ = make_cache(2, Mode.ALL, num_held=0)
    arrived: list[ResidentExpert] = []
    hand_out = cache._hand_out

    def noted(*given: Any) -> list[ResidentExpert]:
        handed = hand_out(*given)
        arrived.extend(handed)
        return handed

    cache._hand_out = noted  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        run(cache, Forgetful(arrived), 3, passes=50)


def test_a_held_expert_that_leaves_while_it_is_computed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_cache, "_MARGIN", -2.0)
    monkeypatch.setattr(expert_cache, "_SWAP_FRACTION", 1.0)
    cache, _ = make_cache(2, Mode.WANTED, num_held=4)
    cache._may_leave = cache.order.may_leave  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        run(cache, Bytes(), 3, passes=50)


@pytest.mark.parametrize("late", [False, True])
def test_held_experts_are_computed_while_none_has_arrived(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring slot of an arrival that waits behind held experts is not read into: half of a small ring stood still."""
    monkeypatch.setattr(expert_cache, "_PIECE_ROWS", 1)
    cache, lane = make_cache(2, Mode.WANTED, num_held=4)
    lane.is_late = late
    groups = group_by_expert(torch.arange(EXPERTS)[None], EXPERTS)
    hidden = torch.zeros(1, 1)
    order = []
    for residents in cache.fetch(0, groups, hidden, hidden):
        order += [one.expert_id for one in residents]
        for one in residents:
            one.finish()
        # Everything arrives once two held experts were computed.
        lane.is_late = late and len(order) < 2
    assert order == ([0, 1, 4, 5, 6, 7, 2, 3] if late else [4, 5, 6, 7, 0, 1, 2, 3])


def test_an_expert_that_fails_holds_nobody_up() -> None:
    class Failing(Bytes):
        def forward(self, rows: torch.Tensor, weights: Any, compute: Matmul) -> None:
            raise ZeroDivisionError

    cache, _ = make_cache(2, Mode.ALL, num_held=0)
    running = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        run(cache, Failing(), 3, passes=1)
    assert threading.active_count() <= running + 2, "threads of the pool, none that waits"


@pytest.mark.parametrize("times", [1, 3])
def test_what_happens_once_is_waited_for(times: int) -> None:
    happened, order = OneShotEvent(), []
    waiting = threading.Thread(target=lambda: (happened.wait(), order.append("waited")))
    waiting.start()
    assert not happened.has_happened
    order.append("set")
    for _ in range(times):
        happened.set()
    waiting.join(timeout=60)
    assert order == ["set", "waited"]
    assert happened.has_happened
    # Whoever comes later need not wait.
    happened.wait()


@pytest.mark.parametrize(("stalled", "forecasts"), [(0, False), (3, True)])
def test_nothing_is_foreseen_where_reads_hide_behind_compute(stalled: int, forecasts: bool) -> None:
    """The lane idles for two expert reads before every router has chosen; compute waits for it, or never does.

    And where it does, guesses that are not used are made in one pass of four."""
    stats = RoutingStats(dict.fromkeys(range(LAYERS), EXPERTS))
    waited, clock = itertools.count(0, stalled), itertools.count(0, 2)
    order = StreamingOrder(
        ExpertFetchQueue(open_stream(2)[0], shard),
        lambda layer: set(),
        ExpertForecast(stats, {layer: torch.randn(EXPERTS, 1) for layer in range(LAYERS)}),
        RouterLatency(lambda: 1.0, lambda: ALIGNMENT, lambda: next(waited), ALIGNMENT, lambda: next(clock)),
        most_ahead=3,
        forced=Mode.WANTED,
    )
    groups = group_by_expert(torch.zeros(TOKENS, 1, dtype=torch.int64), EXPERTS)
    assert order.foresee(0, torch.randn(TOKENS, 1), 1), "nothing was measured yet"
    made = []
    for _ in range(8):
        for layer in range(LAYERS):
            order.begin(layer, groups)
        made.append(bool(order.foresee(0, torch.randn(TOKENS, 1), 1)))
    assert made == [False, False, False, forecasts] * 2
