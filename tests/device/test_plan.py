"""Plans for a device (`runtime/plan/planner.py`, `runtime/plan/placement.py`): nothing is over a budget, nothing is
lost between tiers, and the smallest budgets are tight.
"""

from dataclasses import replace
from typing import Any

import pytest

from moedge.quant.kernels.gpu import Gpu, Lacks
from moedge.runtime.plan.kernels import planned_kernels
from moedge.runtime.plan.placement import LOADING_NBYTES, MIN_RING_EXPERTS, Workload, device_ring
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.settings.errors import DoesNotFit
from moedge.runtime.settings.settings import WITHOUT_KERNELS, DeviceBudget, MemoryBudget, Settings
from moedge.runtime.shape.shards import model_shards, resident_nbytes
from support.known_shapes import known_shape

JOB = Workload(64, 200)
ROOM = DeviceBudget(0, 100 << 20, 300 << 20)
AMPLE = 1 << 40


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "llama"])
def test_every_budget_from_the_smallest_on_is_kept_and_every_shard_is_somewhere(family: str, case: Any) -> None:
    tiny = case(family)
    settings = replace(tiny.settings, max_sequences=64, tokens_per_pass=128)
    smallest, whole = budget_range(tiny.source.shape, settings, JOB, ROOM)
    with pytest.raises(DoesNotFit, match="the smallest that works is --gpu-mem"):
        make_plan(tiny.source.shape, settings, MemoryBudget(AMPLE, replace(ROOM, nbytes=smallest - 1)), JOB)
    for budget in range(smallest, whole + (1 << 20), max(1, (whole - smallest) // 40)):
        room = replace(ROOM, nbytes=budget)
        plan = make_plan(tiny.source.shape, settings, MemoryBudget(AMPLE, room), JOB)
        rings = plan.placement.dense_ring + plan.placement.expert_ring
        assert ROOM.context_nbytes + plan.held_nbytes + rings + plan.kv_nbytes + plan.scratch_nbytes <= budget
        assert plan.staging is not None
        assert plan.held_nbytes + plan.staging.staged_nbytes == plan.weights_nbytes
        assert plan.staging.disk_nbytes == 0
        assert not plan.streams


def test_host_memory_that_is_too_little_to_stream_is_refused_with_what_would_do(case: Any) -> None:
    tiny = case("qwen3_moe")
    shape = tiny.source.shape
    smallest, _ = budget_range(shape, tiny.settings, JOB, ROOM)
    room = replace(ROOM, nbytes=smallest)
    least = make_plan(shape, tiny.settings, MemoryBudget(AMPLE, room), JOB).placement
    fixed = ROOM.process_nbytes + LOADING_NBYTES + resident_nbytes(shape, "fp32")
    rings = least.dense_ring + least.expert_ring
    with pytest.raises(DoesNotFit, match="the smallest that works is --ram"):
        make_plan(shape, tiny.settings, MemoryBudget(fixed + rings - 1, room), JOB)
    plan = make_plan(shape, tiny.settings, MemoryBudget(fixed + rings, room), JOB)
    assert plan.staging is not None
    assert plan.streams
    assert plan.held_nbytes + plan.staging.staged_nbytes + plan.staging.disk_nbytes == plan.weights_nbytes


def test_a_device_s_ring_takes_a_layer_of_experts_but_no_more_than_an_eighth(case: Any) -> None:
    shards = model_shards(case("qwen3_moe").source.shape, "none", "fp32")
    layer = shards.layers[0]
    assert layer.expert is not None
    whole = (layer.num_experts - MIN_RING_EXPERTS) * layer.expert.nbytes
    assert device_ring(shards, 1 << 40) == whole
    assert device_ring(shards, 8 * 5 * layer.expert.nbytes) == (5 - MIN_RING_EXPERTS) * layer.expert.nbytes
    assert device_ring(shards, 0) == 0


AMPERE = Gpu((8, 6), 28)


@pytest.mark.parametrize(
    ("gpu", "quant", "attention", "grouped"),
    [
        (AMPERE, "nf4", "triton", True),
        (AMPERE, "int4", "triton", True),
        (AMPERE, "int4+int3", "triton", True),
        (AMPERE, "int4+vq2", "triton", True),
        (Gpu((7, 5), 14), "nf4", "triton", False),
        (Gpu((8, 6), 28, Lacks.everything("Triton is not installed")), "nf4", "torch", False),
        (Gpu((8, 6), 28, Lacks(attention="it does not compile")), "nf4", "torch", True),
        (Gpu((8, 6), 28, Lacks(experts="it does not compile")), "nf4", "triton", False),
    ],
)
def test_kernels_are_planned_where_they_run_and_their_scratch_is_counted(
    gpu: Gpu, quant: str, attention: str, grouped: bool, case: Any
) -> None:
    # Prompts that take more than what torch's attention takes for decoding.
    shape = case("qwen3_moe").source.shape
    settings = Settings(dtype="bf16", quant=quant, kv="int8", tokens_per_pass=65536, max_sequences=3)
    plans = [
        make_plan(shape, settings, MemoryBudget(AMPLE, replace(ROOM, nbytes=1 << 32, gpu=each)), JOB)
        for each in (gpu, WITHOUT_KERNELS)
    ]
    assert (plans[0].attention, plans[0].grouped_products) == (attention, grouped)
    assert (plans[1].attention, plans[1].grouped_products) == ("torch", False)
    assert planned_kernels(plans[0], shape).products.startswith("triton" if grouped else "torch")
    # Grouped experts alone take a tenth more.
    assert (plans[0].scratch_nbytes > 1.2 * plans[1].scratch_nbytes) == (attention == "triton")
    assert plans[0].lacks == gpu.lacks.reasons
    assert plans[0].stores_by_kernel == (not gpu.lacks.cache)


def test_preempted_sequences_are_parked_in_what_host_memory_has_left(case: Any) -> None:
    shape = case("qwen3_moe").source.shape
    settings = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=64, max_sequences=64)
    # Most rows are short, so more of them run together than have room at their longest.
    job = Workload(64, 200, 10, 64 * 10, 64 * 20)
    smallest, whole = budget_range(shape, settings, job, ROOM)
    tight = replace(ROOM, nbytes=(smallest + whole) // 2)
    ample = replace(ROOM, nbytes=whole + (1 << 32))
    assert sum(make_plan(shape, settings, MemoryBudget(AMPLE, ample), job).parked_blocks) == 0, "nobody is preempted"
    plan = make_plan(shape, settings, MemoryBudget(AMPLE, tight), job)
    assert plan.kv_sequences < plan.max_sequences
    assert plan.parked_blocks == plan.kv_blocks
    assert plan.staging is not None
    staged = AMPLE - plan.staging.free_nbytes
    room = make_plan(shape, settings, MemoryBudget(staged + plan.kv_nbytes // 2, tight), job)
    assert 0 < sum(room.parked_blocks) <= sum(plan.kv_blocks) // 2
    assert sum(make_plan(shape, settings, MemoryBudget(staged, tight), job).parked_blocks) == 0


def test_a_plan_for_a_gpu_says_that_torch_computes_latent_attention() -> None:
    budget = MemoryBudget(64 << 30, replace(ROOM, nbytes=16 << 30, gpu=Gpu((8, 6), 28)))
    plan = make_plan(known_shape("GLM-4.7-Flash"), Settings(quant="int4", kv="bf16"), budget, Workload(100, 600))
    reason = "Triton's kernels do not compute latent attention"
    assert (plan.attention, plan.stores_by_kernel) == ("torch", False)
    assert plan.lacks == {"attention": reason, "cache": reason}
    assert plan.kv_nbytes == sum(plan.kv_blocks) * plan.kv_block * 47 * 1152
