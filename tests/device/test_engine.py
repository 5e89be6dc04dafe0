"""The engine on a device gives the processor's tokens, wherever weights lie (`runtime/weights/streaming.py`,
`offload/stream/cuda_lane.py`), and the counters prove what moved.
"""

from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.offload.stream.stream import StreamBroken
from moedge.runtime.plan import placement
from moedge.runtime.settings.errors import MemoryGaveOut
from moedge.runtime.weights import streaming as lanes


def check(case: Any, fake: Any, plan: Any, temperature: float = 0.0) -> Any:
    """Runs a plan on the fake device; its tokens are those of a run on the processor."""
    wanted = case.run(case.plan(None), temperature=temperature)
    fake.device.limit(plan.budget.device.nbytes - plan.budget.device.context_nbytes)
    with fake:
        ran = case.run(plan, fake.device, temperature)
    assert ran.tokens == wanted.tokens
    assert ran.to_device == ran.passes * (plan.weights_nbytes - plan.held_nbytes)
    assert ran.from_disk == ran.passes * plan.staging.disk_nbytes
    assert fake.nbytes_copied >= ran.to_device
    assert fake.device.peak <= plan.budget.device.nbytes
    return ran


@pytest.mark.sample("minimum-qwen3_moe-nf4", "all-llama-none", "half-qwen3_moe-int4+int3", "half-qwen3_moe-int4+vq2")
@pytest.mark.parametrize(
    ("family", "quant"),
    [
        ("qwen3_moe", "nf4"),
        ("qwen3_moe", "int4+int3"),
        ("mixtral", "int8+int3"),
        ("qwen3_moe", "int4+vq2"),
        ("mixtral", "int8+vq2"),
        ("mixtral", "none"),
        ("gpt_oss", "int8"),
        ("granitemoe", "none"),
        ("llama", "none"),
        ("deepseek_v3", "int8"),
        ("qwen3_next", "int8"),
        ("granitemoehybrid", "none"),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.0], ids=["all", "half", "minimum"])
def test_tokens_are_those_of_the_processor(family: str, quant: str, share: float, case: Any, fakes: ModuleType) -> None:
    fake = fakes.FakeDevice(seed=int(10 * share))
    tiny = case(family, quant)
    ran = check(tiny, fake, tiny.plan(fake.device, share))
    assert (ran.to_device > 0) == (share < 1)
    assert ran.from_disk == 0
    assert (fake.num_looks > 0) == (share < 1), "reads of streamed memory were not looked at again"


@pytest.mark.sample("int8+int3-experts mixed", "none-experts on disk")
@pytest.mark.parametrize("ring_experts", [4, placement.RING_EXPERTS], ids=["experts mixed", "experts on disk"])
@pytest.mark.parametrize("quant", ["none", "int8+int3", "int8+vq2"])
def test_disk_host_and_device_work_as_three_tiers(
    quant: str, ring_experts: int, case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a short ring there is room to stage some of the tiny model's experts, so that one stream has both kinds."""
    monkeypatch.setattr(placement, "RING_EXPERTS", ring_experts)
    fake = fakes.FakeDevice(ring_experts)
    tiny = case("qwen3_moe", quant)
    plan = tiny.three_tiers(fake.device)
    ran = check(tiny, fake, plan)
    assert 0 < ran.from_disk < ran.to_device
    assert (sum(plan.staging.placement.held_experts) > 0) == (ring_experts == 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("limit", [0, 16 << 20])
def test_what_cannot_be_pinned_goes_through_a_ring(limit: int, case: Any, fakes: ModuleType) -> None:
    """Case M7 of the failure table: nothing may be pinned, or the rings and the beginning of the slab."""
    fake = fakes.FakeDevice(pin_limit=limit)
    tiny = case("mixtral")
    plan = tiny.plan(fake.device, 0.0)
    assert plan.staging.staged_nbytes + plan.staging.placement.expert_ring > 0
    ran = check(tiny, fake, plan)
    assert ran.from_disk == 0
    # Every byte that was not pinned crossed the link through a ring: with a limit of 0 that is all.
    assert not fake.cuda.registered, "something stayed pinned"


def test_a_sampled_token_is_the_processor_s_too(case: Any, fakes: ModuleType) -> None:
    tiny, fake = case("qwen3_moe"), fakes.FakeDevice()
    ran = check(tiny, fake, tiny.plan(fake.device, 0.0), temperature=0.9)
    assert ran.tokens != tiny.run(tiny.plan(None)).tokens


def test_what_torch_s_allocator_takes_stays_within_the_plan(case: Any, fakes: ModuleType) -> None:
    """Case M2 of the failure table. Its negative control: with a little less than it takes, the device refuses."""
    tiny, fake = case("mixtral"), fakes.FakeDevice()
    plan = tiny.plan(fake.device, 0.0)
    check(tiny, fake, plan)
    taken = fake.cuda.max_memory_reserved()
    fake = fakes.FakeDevice()
    fake.device.limit(taken - 4096)
    with fake, pytest.raises((torch.OutOfMemoryError, MemoryGaveOut)):
        tiny.run(plan, fake.device)


BROKEN = ("NoReadyWait", "NoUsedWait", "EarlyReady", "UsedNotRecorded", "UsedOnSide", "SideWaits", "WrongBytes")


@pytest.mark.parametrize("bug", BROKEN)
def test_a_lane_without_one_of_its_waits_is_found_out(
    bug: str, case: Any, fakes: ModuleType, bugs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: tokens differ, or what compute read was overwritten, within a few schedules."""
    tiny = case("mixtral")
    wanted = tiny.run(tiny.plan(None)).tokens
    monkeypatch.setattr(lanes, "CudaLane", getattr(bugs, bug))
    for seed in range(6):
        fake = fakes.FakeDevice(seed)
        try:
            with fake:
                if tiny.run(tiny.plan(fake.device, 0.0), fake.device).tokens != wanted:
                    return
        except (fakes.simulator.Race, StreamBroken, RuntimeError):
            return
    raise AssertionError(f"{bug} was not found")
