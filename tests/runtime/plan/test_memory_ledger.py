"""The ledger lists all bytes of a plan by tier, and refuses a peak over any tier's budget."""

import json
from dataclasses import replace

import pytest

from moedge.offload.memory import KEPT_NBYTES
from moedge.runtime.plan.memory_ledger import KEPT, KV_CACHE, PARKED, STAGED, WEIGHTS, MemoryLedger
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.errors import DoesNotFit
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings
from support.known_shapes import plain_model

GIB, MIB = 1 << 30, 1 << 20
SHAPE = plain_model(window=128)
# Most rows are short, so that more run together than fit at their longest, and some are parked.
JOB = Workload(512, 600, 20, 512 * 30, 512 * 100)
SETTINGS = Settings(max_sequences=512, tokens_per_pass=1024)
BUDGETS = {
    "host": MemoryBudget(3 * GIB, None, 20 * GIB),
    "device": MemoryBudget(40 * GIB, DeviceBudget(3 * GIB, 100 * MIB, 300 * MIB)),
    "device and disk": MemoryBudget(3 * GIB, DeviceBudget(2 * GIB, 100 * MIB, 300 * MIB)),
}


@pytest.fixture(params=BUDGETS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return make_plan(SHAPE, SETTINGS, BUDGETS[request.param], JOB)


def test_the_arenas_of_every_tier_add_up_to_what_the_plan_uses(plan: Plan) -> None:
    ledger = MemoryLedger.of(plan, SHAPE)
    assert ledger.computing.planned == plan.used_nbytes
    host = ledger.tiers["host"]
    assert host.planned == plan.budget.host_nbytes - plan.free_nbytes
    assert [tier.budget for tier in ledger.tiers.values()] == [*plan.budget.memory.values(), plan.budget.disk_nbytes]
    assert ledger.computing.arenas[KV_CACHE].planned == plan.kv_nbytes
    weights = ledger.computing.arenas[WEIGHTS].planned
    if plan.staging is not None:
        assert (host.arenas[PARKED].planned > 0) == (sum(plan.parked_blocks) > 0)
        weights += host.arenas[STAGED].planned + plan.staging.disk_nbytes
        assert weights == plan.weights_nbytes
    assert (ledger.tiers["disk"].planned > plan.weights_nbytes) == plan.streams


def test_a_plan_is_the_same_after_json(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.as_dict()))) == plan
    assert Plan.from_json(json.loads(json.dumps(replace(plan, kv_tokens=1).as_dict()))) != plan


@pytest.mark.parametrize(("tier", "option"), [("host", "--ram"), ("device", "--gpu-mem")])
def test_a_peak_over_the_budget_of_any_tier_is_refused_with_the_budget_that_would_do(tier: str, option: str) -> None:
    ledger = MemoryLedger.of(make_plan(SHAPE, SETTINGS, BUDGETS["device"], JOB), SHAPE)
    for other in ledger.tiers.values():
        other.peak = other.budget
    ledger.check()
    assert ledger.over_budget == []
    ledger.tiers[tier].peak = (ledger.tiers[tier].budget or 0) + MIB
    assert [each.tier for each in ledger.over_budget] == [tier]
    wanted = (ledger.tiers[tier].budget or 0) // MIB + 1 + 64
    with pytest.raises(DoesNotFit, match=f"Give {option} {wanted}MiB"):
        ledger.check()


def test_an_arena_that_the_plan_does_not_list_is_not_recorded() -> None:
    ledger = MemoryLedger.of(make_plan(SHAPE, SETTINGS, BUDGETS["host"], JOB), SHAPE)
    with pytest.raises(KeyError):
        ledger.record("host", STAGED, 1)
    ledger.record("host", WEIGHTS, 7)
    assert [(tier, name, arena.actual) for tier, name, arena in ledger.allocated] == [("host", WEIGHTS, 7)]


def test_what_passes_keep_for_the_next_one_is_planned_where_the_budget_has_it() -> None:
    """malloc keeps up to half a GiB of what loading and passes freed; else a peak would be above the plan."""
    whole = make_plan(SHAPE, Settings(quant="none"), MemoryBudget(64 * GIB), Workload(8, 256))
    assert whole.kept_nbytes == KEPT_NBYTES
    assert MemoryLedger.of(whole, SHAPE).computing.arenas[KEPT].planned == KEPT_NBYTES
    assert whole.used_nbytes + whole.free_nbytes == 64 * GIB
    tight = replace(whole, kept_nbytes=0, free_nbytes=0)
    assert KEPT not in MemoryLedger.of(tight, SHAPE).computing.arenas
    budget = MemoryBudget(tight.used_nbytes + GIB // 4)
    short = make_plan(SHAPE, Settings(quant="none", kv="bf16"), budget, Workload(8, 256))
    assert not short.kept_nbytes
    assert short.used_nbytes + short.free_nbytes == budget.host_nbytes
