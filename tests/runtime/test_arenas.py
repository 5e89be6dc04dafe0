"""What is allocated (`runtime/loading/engine_loader.py`) is what the plan accounts for
(`runtime/plan/memory_ledger.py`), to the byte, in every arena of every tier.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource, open_source

JOB = Workload(40, 120, 120, 40 * 80, 40 * 40)


# torch may use fewer threads than the CPU has, so that fewer of them need scratch.
BOUNDED = {"scratch of products"}


def check(source: ModelSource, plan: Plan, store: Path | None) -> dict[str, int]:
    """Allocated bytes by arena, all of which the plan accounts for."""
    with closing(load_engine(source, plan, store)) as loaded:
        arenas = {name: arena for _, name, arena in loaded.ledger.allocated}
        assert {"weights held", "rings of streamed weights", "KV cache", "scratch of products"} <= set(arenas)
        allocated = {name: arena.actual for name, arena in arenas.items()}
        assert allocated["weights held"] == loaded.streamed.memory.held_nbytes
        assert allocated["KV cache"] == sum(pool.nbytes for pool in loaded.engine.scheduler.cache.pools)
        assert allocated["rings of streamed weights"] == loaded.streamed.ring_nbytes
        assert loaded.streamed.memory.slab.nbytes == sum(map(len, loaded.parking.slots)) == 0, "no device, no staging"
    for name, arena in arenas.items():
        assert arena.actual <= arena.planned if name in BOUNDED else arena.actual == arena.planned, name
    assert sum(arena.planned for arena in loaded.ledger.computing.arenas.values()) == plan.used_nbytes
    return allocated


@pytest.mark.sample("gpt_oss-nf4-int8", "glm4_moe_lite-int8-int4")
@pytest.mark.parametrize(
    ("family", "quant", "kv"),
    [
        ("qwen3_moe", "none", "fp32"),
        ("gpt_oss", "nf4", "int8"),
        ("llama", "int8", "bf16"),
        ("glm4_moe_lite", "int8", "int4"),
        ("deepseek_v32", "nf4", "int8"),
        ("kimi_linear", "int8", "int4"),
        ("bailing_hybrid", "none", "fp32"),
        ("minimax", "nf4", "int8"),
        ("lfm3", "int8", "bf16"),
    ],
)
def test_arenas_take_what_the_plan_says(
    family: str, quant: str, kv: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    settings = Settings(dtype="fp32", quant=quant, kv=kv)
    sizes = {"num_hidden_layers": 2} if family in ("gpt_oss", "glm4_moe_lite") else {}
    with open_source(str(checkpoint(family, **sizes))) as source:
        prepare(source, tmp_path / "store", quant, "fp32", Budgets().on_cpu())
        smallest, whole = budget_range(source.shape, settings, JOB)
        budgets = (smallest, (smallest + whole) // 2, 4 << 30)
        plans = [make_plan(source.shape, settings, MemoryBudget(budget), JOB) for budget in budgets]
        found = [check(source, plan, tmp_path / "store" if plan.streams else None) for plan in plans]
    assert found[0]["rings of streamed weights"] > 0
    assert found[-1]["rings of streamed weights"] == 0
    assert found[0]["KV cache"] < found[-1]["KV cache"]
