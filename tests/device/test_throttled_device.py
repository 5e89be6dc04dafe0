"""The device of `bench/throttled_link.py`: what its copies bring is what was sent, in the order of the streams."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from support.device.throttled_device import ThrottledDevice


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("planted", [False, True])
def test_an_engine_on_it_gives_the_processor_s_tokens(
    planted: bool, case: Any, fakes: ModuleType, host_kv: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: compute that does not wait for copies."""
    tiny = host_kv.many(case("qwen3_moe"))
    wanted = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6))
    plan = host_kv.hosted(tiny, tiny.plan(fakes.FakeDevice().device, 0.0), 1, 3, 2)
    throttled = ThrottledDevice(bytes_s=2e8)
    if planted:
        monkeypatch.setattr(throttled.cuda.compute, "wait_event", lambda event: None)
    with throttled:
        ran = host_kv.run(tiny, plan, throttled.device)
        throttled.device.synchronize()
    streamed = ran.passes * (plan.weights_nbytes - plan.held_nbytes)
    assert (ran.tokens == wanted.tokens) != planted
    # What was asked for ahead of a next pass has come, too.
    assert planted or streamed + ran.read <= throttled.cuda.nbytes <= streamed + ran.read + plan.placement.ring_nbytes
    throttled.cuda.close()
