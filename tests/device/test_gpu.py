"""The engine on a real device (`runtime/weights/streaming.py`, `offload/device.py`): wherever weights lie its tokens
are the same, and what it takes stays in budget.
"""

from typing import Any

import pytest
import torch

from moedge.offload.device import Device, find_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def device() -> Device:
    found = find_device()
    assert found is not None
    found.limit(found.total)
    return found


@pytest.mark.parametrize(
    ("family", "quant"), [("mixtral", "none"), ("qwen3_moe", "nf4"), ("gpt_oss", "int8"), ("llama", "none")]
)
def test_tokens_do_not_depend_on_where_weights_lie(family: str, quant: str, case: Any, device: Device) -> None:
    tiny = case(family, quant)
    plans = [*(tiny.plan(device, share) for share in (1.0, 0.6, 0.0)), tiny.three_tiers(device)]
    runs = [tiny.run(plan, device) for plan in plans]
    assert all(run.tokens == runs[0].tokens for run in runs)
    for plan, run in zip(plans, runs, strict=True):
        assert run.to_device == run.passes * (plan.weights_nbytes - plan.held_nbytes)
        assert run.from_disk == run.passes * plan.staging.disk_nbytes
    assert runs[0].to_device == 0 < runs[1].to_device
    assert runs[3].from_disk > 0


def test_greedy_tokens_are_those_of_the_processor(case: Any, device: Device) -> None:
    tiny = case("mixtral")
    assert tiny.run(tiny.plan(device, 0.0), device).tokens == tiny.run(tiny.plan(None)).tokens


def test_streaming_behind_a_busy_device_never_shows(case: Any, device: Device) -> None:
    tiny = case("qwen3_moe")
    wanted = tiny.run(tiny.plan(device), device).tokens
    for number in range(10):
        torch.cuda._sleep(number * 3_000_000)
        assert tiny.run(tiny.plan(device, 0.0), device).tokens == wanted


def test_the_driver_sees_no_more_than_the_peak_says(device: Device) -> None:
    before = device.peak
    block = device.allocate(256 << 20)
    free, total = torch.cuda.mem_get_info()
    assert device.peak - before >= block.numel()
    assert total - free - (total - device.available) <= device.peak
    device.limit(128 << 20)
    del block
    # Else the allocator would hand out the block that it has kept.
    device.give_back()
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate(256 << 20)
    device.limit(device.total)
