"""What is given up, in which order, and that what is left is a plan whose bytes are true."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.fallback import FallbackPolicy
from moedge.runtime.plan.placement import MIN_RING_EXPERTS, Plan, Workload
from moedge.runtime.plan.planner import PlanRequest, budget_range, make_plan
from moedge.runtime.settings.errors import MemoryGaveOut
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings
from support.known_shapes import plain_model

RING = "experts in flight"
GIB, MIB = 1 << 30, 1 << 20
SHAPE = plain_model(window=128)
# Most rows are short, so that more run together than have room at their longest, and some are parked.
JOB = Workload(512, 600, 20, 512 * 30, 512 * 100)
SETTINGS = Settings(max_sequences=512, tokens_per_pass=1024)
ROOM = DeviceBudget(3 * GIB, 100 * MIB, 300 * MIB)


def request(device: DeviceBudget | None) -> PlanRequest:
    return PlanRequest(costs=CostModel(SHAPE), workload=JOB, budget=MemoryBudget(0, device), settings=SETTINGS)


def all_fallbacks(plan: Plan, room: DeviceBudget | None) -> tuple[list[Plan], FallbackPolicy, str]:
    policy, plans = FallbackPolicy(plan, request(room)), [plan]
    while True:
        try:
            policy.before_passes("no memory")
        except MemoryGaveOut as refusal:
            return plans, policy, str(refusal)
        plans.append(policy.plan)


@pytest.mark.parametrize("room", [None, ROOM], ids=["host", "device"])
def test_the_order_is_prefetch_depth_then_sequences_then_parked_blocks(room: DeviceBudget | None) -> None:
    plan = make_plan(SHAPE, SETTINGS, MemoryBudget(3 * GIB if room is None else 40 * GIB, room), JOB)
    plans, policy, refusal = all_fallbacks(plan, room)
    kinds = [each.what for each in policy.applied]
    order = [RING, "sequences"] + (["parked blocks"] if room else [])
    assert list(dict.fromkeys(kinds)) == order
    assert kinds == sorted(kinds, key=order.index)
    assert [each.after < each.before for each in policy.applied] == [True] * len(kinds)
    last = plans[-1]
    assert (last.max_sequences, last.kv_sequences, sum(last.parked_blocks)) == (1, 1, 0)
    assert policy.applied[kinds.index("sequences") - 1].after == MIN_RING_EXPERTS
    smallest = budget_range(SHAPE, replace(SETTINGS, dtype=plan.dtype, quant=plan.quant, kv=plan.kv), JOB, room)[0]
    named = re.search(r"(--ram|--gpu-mem) (\d+)MiB", refusal)
    assert named is not None
    assert named[1] == ("--ram" if room is None else "--gpu-mem")
    assert int(named[2]) * MIB <= smallest + MIB


@pytest.mark.parametrize("room", [None, ROOM], ids=["host", "device"])
def test_every_plan_that_is_left_accounts_for_its_bytes_and_takes_the_longest_row(room: DeviceBudget | None) -> None:
    plan = make_plan(SHAPE, SETTINGS, MemoryBudget(3 * GIB if room is None else 40 * GIB, room), JOB)
    plans, policy, _ = all_fallbacks(plan, room)
    specs = [KVSpec(group, plan.kv, plan.kv_block) for group in SHAPE.kv_groups]
    for (before, after), made in zip(pairwise(plans), policy.applied, strict=True):
        assert after.kv_nbytes == sum(n * spec.block_nbytes for n, spec in zip(after.kv_blocks, specs, strict=True))
        assert after.kv_tokens >= JOB.longest
        assert all(here <= there for here, there in zip(after.parked_blocks, after.kv_blocks, strict=True))
        assert after.used_nbytes <= before.used_nbytes
        assert (after.used_nbytes < before.used_nbytes) == (after.kv_blocks != before.kv_blocks or made.what == RING)
        for name in ("dtype", "quant", "kv", "compute", "deterministic", "attention", "kv_block"):
            assert getattr(after, name) == getattr(plan, name), "answers depend on it"


def test_in_a_pass_the_ring_and_the_cache_stay() -> None:
    plan = make_plan(SHAPE, SETTINGS, MemoryBudget(40 * GIB, ROOM), JOB)
    policy, tokens = FallbackPolicy(plan, request(ROOM)), 700
    while tokens > 1:
        policy.in_pass("no memory", tokens)
        tokens //= 2
        assert (policy.plan.tokens_per_pass, policy.plan.kv_blocks) == (tokens, plan.kv_blocks)
        assert policy.plan.placement == plan.placement
        assert policy.plan.max_sequences <= tokens
    if sum(plan.parked_blocks):
        policy.in_pass("no memory", 1)
    assert not any(policy.plan.parked_blocks)
    with pytest.raises(MemoryGaveOut, match="no fallback is left"):
        policy.in_pass("no memory", 1)
