"""Plans for a device: nothing is over a budget, nothing is lost between tiers, and the smallest budgets are tight."""

from dataclasses import replace
from typing import Any

import pytest

from moedge.runtime.errors import DoesNotFit
from moedge.runtime.plan.device_plan import LOADING_NBYTES, DeviceRoom
from moedge.runtime.plan.job import JobShape
from moedge.runtime.plan.placement import MIN_RING_EXPERTS, device_ring
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.shape.layouts import resident_nbytes
from moedge.runtime.shape.shards import model_shards

JOB = JobShape(64, 200)
ROOM = DeviceRoom(0, 100 << 20, 300 << 20)
AMPLE = 1 << 40


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "llama"])
def test_every_budget_from_the_smallest_on_is_kept_and_every_shard_is_somewhere(family: str, case: Any) -> None:
    tiny = case(family)
    settings = replace(tiny.settings, max_sequences=64, tokens_per_pass=128)
    smallest, whole = budget_range(tiny.source.shape, settings, JOB, ROOM)
    with pytest.raises(DoesNotFit, match="the smallest that works is --gpu-mem"):
        make_plan(tiny.source.shape, settings, AMPLE, JOB, replace(ROOM, budget_nbytes=smallest - 1))
    for budget in range(smallest, whole + (1 << 20), max(1, (whole - smallest) // 40)):
        room = replace(ROOM, budget_nbytes=budget)
        plan = make_plan(tiny.source.shape, settings, AMPLE, JOB, room)
        rings = plan.placement.dense_ring + plan.placement.expert_ring
        assert ROOM.context_nbytes + plan.held_nbytes + rings + plan.kv_nbytes + plan.scratch_nbytes <= budget
        assert plan.device is not None
        assert plan.held_nbytes + plan.device.staged_nbytes == plan.weights_nbytes
        assert plan.device.disk_nbytes == 0
        assert not plan.streams


def test_host_memory_that_is_too_little_to_stream_is_refused_with_what_would_do(case: Any) -> None:
    tiny = case("qwen3_moe")
    shape = tiny.source.shape
    smallest, _ = budget_range(shape, tiny.settings, JOB, ROOM)
    room = replace(ROOM, budget_nbytes=smallest)
    least = make_plan(shape, tiny.settings, AMPLE, JOB, room).placement
    fixed = ROOM.process_nbytes + LOADING_NBYTES + resident_nbytes(shape, "fp32")
    rings = least.dense_ring + least.expert_ring
    with pytest.raises(DoesNotFit, match="the smallest that works is --ram"):
        make_plan(shape, tiny.settings, fixed + rings - 1, JOB, room)
    plan = make_plan(shape, tiny.settings, fixed + rings, JOB, room)
    assert plan.device is not None
    assert plan.streams
    assert plan.held_nbytes + plan.device.staged_nbytes + plan.device.disk_nbytes == plan.weights_nbytes


def test_a_device_s_ring_takes_a_layer_of_experts_but_no_more_than_an_eighth(case: Any) -> None:
    shards = model_shards(case("qwen3_moe").source.shape, "none", "fp32")
    layer = shards.layers[0]
    assert layer.expert is not None
    whole = (layer.num_experts - MIN_RING_EXPERTS) * layer.expert.nbytes
    assert device_ring(shards, 1 << 40) == whole
    assert device_ring(shards, 8 * 5 * layer.expert.nbytes) == (5 - MIN_RING_EXPERTS) * layer.expert.nbytes
    assert device_ring(shards, 0) == 0
