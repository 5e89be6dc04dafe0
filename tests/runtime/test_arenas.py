"""What is allocated is what the plan accounts for, to the byte, in every arena of every tier."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.plan import Workload
from moedge.runtime.plan.planner import Plan, Settings, budget_range, make_plan
from moedge.runtime.settings.budgets import Budgets
from moedge.runtime.source.model_source import ModelSource, open_source

JOB = Workload(40, 120, 120, 40 * 80, 40 * 40)


def planned_arenas(plan: Plan, block_nbytes: tuple[int, ...]) -> dict[str, int]:
    """Bytes by arena as the plan accounts for them; a block of each layer group takes `block_nbytes`."""
    return {
        "held weights": plan.held_nbytes,
        "rings": plan.placement.dense_ring + plan.placement.expert_ring,
        "KV cache": plan.kv_nbytes,
        "staged weights": 0 if plan.device is None else plan.device.staged_nbytes,
        "parked": sum(count * nbytes for count, nbytes in zip(plan.parked_blocks, block_nbytes, strict=True)),
    }


def allocated_arenas(loaded: LoadedEngine) -> dict[str, int]:
    """Bytes by arena as they were allocated."""
    cache, streamed = loaded.engine.scheduler.cache, loaded.streamed
    return {
        "held weights": streamed.memory.held_nbytes,
        "rings": streamed.ring_nbytes,
        "KV cache": sum(pool.nbytes for pool in cache.pools),
        "staged weights": streamed.memory.slab.nbytes,
        "parked": sum(slot.numel() for group in loaded.parking.slots for slot in group),
    }


def check(source: ModelSource, plan: Plan, store: Path | None) -> dict[str, int]:
    blocks = tuple(KVSpec(group, plan.kv, plan.kv_block).block_nbytes for group in source.shape.kv_groups)
    with closing(load_engine(source, plan, store)) as loaded:
        allocated = allocated_arenas(loaded)
    assert allocated == planned_arenas(plan, blocks)
    return allocated


@pytest.mark.parametrize(
    ("family", "quant", "kv"), [("qwen3_moe", "none", "fp32"), ("gpt_oss", "nf4", "int8"), ("llama", "int8", "bf16")]
)
def test_arenas_take_what_the_plan_says(
    family: str, quant: str, kv: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = Settings("fp32", quant, kv)
    with open_source(str(checkpoint(family))) as source:
        prepare(source, tmp_path / "store", quant, "fp32", Budgets())
        smallest, whole = budget_range(source.shape, settings, JOB)
        budgets = (smallest, (smallest + whole) // 2, 4 << 30)
        plans = [make_plan(source.shape, settings, budget, JOB) for budget in budgets]
        found = [check(source, plan, tmp_path / "store" if plan.streams else None) for plan in plans]
    assert found[0]["rings"] > 0
    assert found[-1]["rings"] == 0
    assert found[0]["KV cache"] < found[-1]["KV cache"]
