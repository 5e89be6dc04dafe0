"""Modes, held shares and tiers (`moe/streaming_mode.py`, `moe/streaming_order.py`, `moe/expert_cache.py`) never show in
the tokens; broken variants do.
"""

from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.moe.expert_cache import ExpertSlots
from moedge.moe.streaming_mode import Mode
from moedge.moe.streaming_order import ExpertFetchQueue
from moedge.offload.stream.stream import ShardKey

# Each mode, share and tier mix in some combination; matrix/expert_modes.py has all of them.
SOME = [
    ("qwen3_moe", "disk-host", 0.1, None, True),
    ("qwen3_moe", "host-device", 0.5, Mode.WANTED, True),
    ("qwen3_moe", "disk-host-device", 0.5, Mode.FORECAST, True),
    ("mixtral", "disk-host", 0.5, Mode.FORECAST, False),
    ("mixtral", "disk-host-device", 0.1, Mode.WANTED, True),
    ("gpt_oss", "disk-host", 0.5, Mode.WANTED, True),
    ("gpt_oss", "host-device", 0.0, Mode.FORECAST, False),
    ("granitemoe", "disk-host", 0.0, Mode.FORECAST, False),
    ("granitemoe", "disk-host-device", 0.1, Mode.ALL, True),
    ("olmoe", "disk-host", 0.1, Mode.ALL, True),
    ("olmoe", "host-device", 1.0, None, False),
    ("llama4_text", "disk-host", 0.5, Mode.FORECAST, True),
    ("llama4_text", "host-device", 0.1, Mode.WANTED, False),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "tiers", "share", "mode", "restless"), SOME)
def test_no_way_shows_in_the_tokens(
    family: str,
    tiers: str,
    share: float,
    mode: Mode | None,
    restless: bool,
    case: Any,
    fakes: ModuleType,
    modes: ModuleType,
) -> None:
    tiny = case(family)
    wanted = tiny.run(tiny.plan(None)).tokens
    way = modes.Way(tiers, share, mode, restless)
    assert list(modes.faults(way, way.run(tiny, fakes), wanted)) == []


def test_modes_differ_in_what_they_read(case: Any, fakes: ModuleType, modes: ModuleType) -> None:
    tiny = case("qwen3_moe")
    ran = {mode: modes.Way("disk-host", 0.0, mode, False).run(tiny, fakes) for mode in Mode}
    assert ran[Mode.WANTED].from_disk < ran[Mode.FORECAST].from_disk < ran[Mode.ALL].from_disk
    assert ran[Mode.FORECAST].experts.forecast.recall > 0
    assert ran[Mode.FORECAST].experts.forecast.wasted_bytes > 0
    assert ran[Mode.WANTED].experts.forecast.precision is None


def differs(case: Any, fakes: ModuleType, modes: ModuleType, mode: Mode, restless: bool) -> bool:
    tiny = case("qwen3_moe")
    wanted = tiny.run(tiny.plan(None)).tokens
    return bool(modes.Way("disk-host", 0.5, mode, restless).run(tiny, fakes).tokens != wanted)


def test_a_slot_that_is_not_filled_shows(
    case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = ExpertSlots.swap

    def forgets(self: ExpertSlots, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> None:
        swap(self, leaving, entering, self._memory.shard(leaving))

    monkeypatch.setattr(ExpertSlots, "swap", forgets)
    assert differs(case, fakes, modes, Mode.WANTED, True)


def test_a_neighbour_s_bytes_show(
    case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = ExpertFetchQueue.__init__

    def mistaken(self: ExpertFetchQueue, stream: Any, shard: Any) -> None:
        begin(self, stream, lambda key: shard(key._replace(expert=key.expert ^ 1)))

    monkeypatch.setattr(ExpertFetchQueue, "__init__", mistaken)
    assert differs(case, fakes, modes, Mode.WANTED, False)


def test_a_forecast_that_knows_the_future_wastes_nothing(
    case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a first run wanted, turn by turn, is what the second one guesses; first layers are not guessed."""
    from moedge.moe.expert_cache import Popular
    from moedge.moe.streaming_order import ExpertForecast

    tiny = case("qwen3_moe")
    future: list[tuple[int, list[int]]] = []
    observe = Popular.observe

    def record(self: Popular, layer: int, wanted: list[int]) -> None:
        future.append((layer, list(wanted)))
        observe(self, layer, wanted)

    monkeypatch.setattr(Popular, "observe", record)
    way = modes.Way("disk-host", 0.5, Mode.WANTED, True)
    wanted = way.run(tiny, fakes)
    known = iter([experts for layer, experts in future if layer != future[0][0]])
    monkeypatch.setattr(
        ExpertForecast,
        "guess",
        lambda self, foreseen, held, most: [e for e in next(known) if e not in held],
    )
    ran = modes.Way("disk-host", 0.5, Mode.FORECAST, True).run(tiny, fakes)
    assert ran.tokens == wanted.tokens
    assert (ran.experts.unwanted, ran.experts.forecast.precision) == (0, 1.0)
    assert ran.experts.forecast.recall > 0.6, "all but the first layer's"


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_the_worst_guesses_cost_bandwidth_only(
    seed: int, case: Any, fakes: ModuleType, modes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses drawn at random, and as many as there are."""
    from moedge.moe.streaming_order import ExpertForecast

    generator = torch.Generator().manual_seed(seed)

    def random_guess(self: ExpertForecast, foreseen: Any, held: Any, most: int) -> list[int]:
        order = torch.randperm(next(iter(self.stats.layers.values())).num_experts, generator=generator).tolist()
        return [expert for expert in order if expert not in held]

    monkeypatch.setattr(ExpertForecast, "guess", random_guess)
    assert not differs(case, fakes, modes, Mode.FORECAST, bool(seed % 2))
