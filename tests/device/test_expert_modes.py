"""Modes, policies, held shares and tiers never show in the tokens; broken variants do."""

from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.moe.expert_cache import ExpertSlots
from moedge.moe.streaming_mode import Hold, Mode
from moedge.moe.streaming_order import ExpertFetchQueue
from moedge.offload.stream.lane import ShardKey

# Each mode, policy, share and tier mix in some combination; matrix/expert_modes.py has all of them.
SOME = [
    ("qwen3_moe", "disk-host", 0.1, None, Hold.LRU),
    ("qwen3_moe", "host-device", 0.5, Mode.WANTED, Hold.LRU),
    ("qwen3_moe", "disk-host-device", 0.5, Mode.FORECAST, Hold.LRU),
    ("mixtral", "disk-host", 0.5, Mode.FORECAST, Hold.POPULAR),
    ("mixtral", "disk-host-device", 0.1, Mode.WANTED, Hold.LRU),
    ("gpt_oss", "disk-host", 0.5, Mode.WANTED, Hold.LRU),
    ("gpt_oss", "host-device", 0.0, Mode.FORECAST, Hold.POPULAR),
    ("granitemoe", "disk-host", 0.0, Mode.FORECAST, Hold.POPULAR),
    ("granitemoe", "disk-host-device", 0.1, Mode.ALL, Hold.LRU),
    ("olmoe", "disk-host", 0.1, Mode.ALL, Hold.LRU),
    ("olmoe", "host-device", 1.0, None, Hold.POPULAR),
    ("llama4_text", "disk-host", 0.5, Mode.FORECAST, Hold.LRU),
    ("llama4_text", "host-device", 0.1, Mode.WANTED, Hold.POPULAR),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "tiers", "share", "mode", "hold"), SOME)
def test_no_way_shows_in_the_tokens(
    family: str,
    tiers: str,
    share: float,
    mode: Mode | None,
    hold: Hold,
    case: Any,
    fakes: ModuleType,
    modes: ModuleType,
) -> None:
    tiny = case(family)
    wanted = tiny.run(tiny.plan(None)).tokens
    way = modes.Way(tiers, share, mode, hold)
    assert list(modes.faults(way, way.run(tiny, fakes), wanted)) == []


def test_modes_differ_in_what_they_read(case: Any, fakes: ModuleType, modes: ModuleType) -> None:
    tiny = case("qwen3_moe")
    ran = {mode: modes.Way("disk-host", 0.0, mode, Hold.POPULAR).run(tiny, fakes) for mode in Mode}
    assert ran[Mode.WANTED].from_disk < ran[Mode.FORECAST].from_disk < ran[Mode.ALL].from_disk
    assert ran[Mode.FORECAST].experts.forecast.recall > 0
    assert ran[Mode.FORECAST].experts.forecast.wasted_bytes > 0
    assert ran[Mode.WANTED].experts.forecast.precision is None


def differs(case: Any, fakes: ModuleType, modes: ModuleType, mode: Mode, hold: Hold) -> bool:
    tiny = case("qwen3_moe")
    wanted = tiny.run(tiny.plan(None)).tokens
    return bool(modes.Way("disk-host", 0.5, mode, hold).run(tiny, fakes).tokens != wanted)


def test_a_slot_that_is_not_filled_shows(
    case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = ExpertSlots.swap

    def forgets(self: ExpertSlots, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> None:
        swap(self, leaving, entering, self._memory.shard(leaving))

    monkeypatch.setattr(ExpertSlots, "swap", forgets)
    assert differs(case, fakes, modes, Mode.WANTED, Hold.LRU)


def test_a_neighbour_s_bytes_show(
    case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ExpertFetchQueue.__init__

    def mistaken(self: ExpertFetchQueue, stream: Any, shard: Any) -> None:
        begin(self, stream, lambda key: shard(key._replace(expert=key.expert ^ 1)))

    monkeypatch.setattr(ExpertFetchQueue, "__init__", mistaken)
    assert differs(case, fakes, modes, Mode.WANTED, Hold.POPULAR)


def test_a_forecast_that_knows_the_future_wastes_nothing(
    case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a first run wanted, turn by turn, is what the second one guesses."""
    from moedge.moe.forecast import Forecast
    from moedge.moe.policy import Lru

    future: list[list[int]] = []
    observe = Lru.observe

    def record(self: Lru, layer: int, wanted: list[int]) -> None:
        future.append(list(wanted))
        observe(self, layer, wanted)

    monkeypatch.setattr(Lru, "observe", record)
    way, tiny = modes.Way("disk-host", 0.5, Mode.WANTED, Hold.LRU), case("qwen3_moe")
    wanted = way.run(tiny, fakes)
    known = iter([*future[1:], []])
    monkeypatch.setattr(
        Forecast, "guess", lambda self, layer, groups, hidden, held, most: [e for e in next(known) if e not in held]
    )
    ran = modes.Way("disk-host", 0.5, Mode.FORECAST, Hold.LRU).run(tiny, fakes)
    assert ran.tokens == wanted.tokens
    assert (ran.experts.unwanted, ran.experts.forecast.precision) == (0, 1.0)
    assert ran.experts.forecast.recall > 0.9, "all but the first layer's"


@pytest.mark.parametrize("seed", range(4))
def test_the_worst_guesses_cost_bandwidth_only(
    seed: int, case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses drawn at random, and as many as there are."""
    from moedge.moe.forecast import Forecast

    generator = torch.Generator().manual_seed(seed)

    def random_guess(self: Forecast, layer: int, groups: Any, hidden: Any, held: Any, most: int) -> list[int]:
        order = torch.randperm(self.stats.num_experts(layer), generator=generator).tolist()
        return [expert for expert in order if expert not in held]

    monkeypatch.setattr(Forecast, "guess", random_guess)
    assert not differs(case, fakes, modes, Mode.FORECAST, (Hold.LRU, Hold.POPULAR)[seed % 2])
