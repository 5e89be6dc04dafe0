"""Layers whose experts all come are computed together by a device that groups tokens itself (`moe/routed_experts.py`):
they give the tokens and the counts of layers whose host knows who chose which.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from moedge.moe import routed_experts
from moedge.moe.expert_cache import StreamingExpertCache
from moedge.moe.streaming_mode import Mode
from moedge.offload.stream.stream import StreamBroken
from moedge.runtime.shape.shards import model_shards

AMPERE = (8, 6)


def planned(tiny: Any, device: Any, share: float, on_disk: bool = False) -> Any:
    """So many experts held, and a ring for a layer of others and a quarter more."""
    plan = tiny.held(device, share, on_disk=on_disk)
    layer = max(model_shards(tiny.source.shape, tiny.settings.quant, "fp32").layers, key=lambda each: each.num_experts)
    ring = -(-5 * layer.num_experts // 4) * layer.expert.nbytes
    staging = replace(plan.staging, placement=replace(plan.staging.placement, expert_ring=ring))
    return replace(plan, placement=replace(plan.placement, expert_ring=ring), staging=staging)


def run(tiny: Any, fakes: ModuleType, share: float, mode: Mode | None = Mode.ALL, seed: int = 3, **how: Any) -> Any:
    tiny = replace(tiny, settings=replace(tiny.settings, tokens_per_pass=16), lengths=(2, 11), new_tokens=2)
    with fakes.FakeDevice(seed, capability=AMPERE) as fake:
        plan = planned(tiny, fake.device, share, **how)
        ran = tiny.run(plan, fake.device, stream=mode, loaded_now=fake.launched.clear)
    return ran, fake, tiny.run(tiny.plan(None)).tokens


@contextmanager
def by_the_host() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamingExpertCache, "reads_all", lambda *_: False)
        yield


@pytest.mark.sample("gpt_oss-mxfp4-0.5-True", "qwen3_moe-nf4-0.0-False")
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(
    ("family", "quant"), [("qwen3_moe", "nf4"), ("qwen3_moe", "int4"), ("gpt_oss", "mxfp4"), ("mixtral", "none")]
)
def test_the_device_gives_the_tokens_and_counts_of_the_host(
    family: str, quant: str, share: float, on_disk: bool, case: Any, fakes: ModuleType
) -> None:
    tiny = case(family, quant)
    ran, fake, wanted = run(tiny, fakes, share, on_disk=on_disk)
    with by_the_host():
        other, its_fake, _ = run(tiny, fakes, share, on_disk=on_disk)
    assert ran.tokens == other.tokens == wanted
    sharded = model_shards(tiny.source.shape, tiny.settings.quant, "fp32").layers
    layers = sum(layer.num_experts > 0 for layer in sharded)
    # The first pass chooses how experts stream.
    assert fake.launched["group_choices"] == layers * ran.passes
    assert not its_fake.launched["group_choices"]
    assert (ran.to_device, ran.from_disk) == (other.to_device, other.from_disk)
    assert ran.experts.modes == other.experts.modes == {"all": layers * ran.passes}
    assert (ran.experts.fetched, ran.experts.union) == (other.experts.fetched, other.experts.union)
    # Those who are held change places with those that come only where the host knows who is wanted.
    if not share:
        assert ran.experts == other.experts


def test_a_ring_for_one_layer_leaves_it_to_the_host(case: Any, fakes: ModuleType) -> None:
    """While a device computes a layer, the next one comes."""
    tiny = case("qwen3_moe", "nf4")
    with fakes.FakeDevice(3, capability=AMPERE) as fake:
        plan = tiny.held(fake.device, 0.0, on_disk=False)
        ran = tiny.run(plan, fake.device, stream=Mode.ALL, loaded_now=fake.launched.clear)
    assert ran.experts.modes.keys() == {"all"}
    assert not fake.launched["group_choices"]


def _released_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    read = StreamingExpertCache.read_all

    def early(self: Any, *asked: Any) -> Any:
        found = read(self, *asked)
        self.computed_all()
        return found

    patch.setattr(StreamingExpertCache, "read_all", early)


def _another_expert(patch: pytest.MonkeyPatch) -> None:
    read = StreamingExpertCache.read_all
    patch.setattr(StreamingExpertCache, "read_all", lambda self, *asked: [*(found := read(self, *asked))[1:], found[0]])


def _addresses_of_the_pass_before(patch: pytest.MonkeyPatch) -> None:
    place, known = routed_experts.RoutedStream._place, {}
    patch.setattr(
        routed_experts.RoutedStream, "_place", lambda self, experts: known.setdefault(id(self), place(self, experts))
    )


BUGS = [_released_before_they_are_computed, _another_expert, _addresses_of_the_pass_before]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = case("qwen3_moe", "nf4")
    bug(monkeypatch)
    for seed in range(8):
        try:
            ran, _, wanted = run(tiny, fakes, 0.0, seed=seed)
        except (fakes.simulator.Race, StreamBroken):
            return
        if ran.tokens != wanted:
            return
    pytest.fail("nothing shows it")
