"""Nothing grows while rows come and go: case M8 of the failure table."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from moedge.offload.memory import host_resident
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.settings.budgets import MemoryBudget
from moedge.runtime.settings.settings import Settings
from moedge.runtime.source.model_source import open_source

MIB = 1 << 20
WARM, ROWS, LIVE = 1000, 4000, 64


@pytest.mark.slow
@pytest.mark.slow
def test_m8_a_long_run_holds_no_more_memory_and_no_more_blocks_than_a_short_one(
    checkpoint: Callable[[str], Path],
) -> None:
    settings = Settings(tokens_per_pass=512, max_sequences=LIVE)
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(LIVE, 16))
        with closing(load_engine(source, plan, None, None)) as loaded:
            engine, resident = loaded.engine, {}
            for finished in range(LIVE, ROWS + 1, LIVE):
                for row in range(LIVE):
                    prompt = [5 + (finished + row + place) % 370 for place in range(8)]
                    engine.add(Sequence(prompt, SamplingParams(2, ignore_eos=True)))
                list(engine.run())
                assert all(group.allocator.num_live == 0 for group in engine.scheduler.cache.groups)
                resident[finished] = host_resident()
    grown = resident[max(resident)] - min(size for rows, size in resident.items() if rows >= WARM)
    assert grown < (ROWS - WARM) // 1000 * MIB
