"""Nothing grows while rows come and go (`runtime/engine/`, `runtime/kv/`): case M8 of the failure table."""

from collections.abc import Callable
from typing import Any

import pytest

from moedge.offload.memory import host_resident
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.plan.placement import Workload
from moedge.runtime.sampling.params import SequenceSampling

MIB = 1 << 20
WARM, ROWS, LIVE = 1000, 4000, 64


@pytest.mark.slow
def test_m8_a_long_run_holds_no_more_memory_and_no_more_blocks_than_a_short_one(
    engine: Callable[..., Any],
) -> None:
    settings = {"dtype": "auto", "quant": "auto", "kv": "auto", "tokens_per_pass": 512, "max_sequences": LIVE}
    running = engine("qwen3_moe", Workload(LIVE, 16), ram=4 << 30, **settings).engine
    resident = {}
    for finished in range(LIVE, ROWS + 1, LIVE):
        for row in range(LIVE):
            prompt = [5 + (finished + row + place) % 370 for place in range(8)]
            running.add(Sequence(prompt, SequenceSampling(2, ignore_eos=True)))
        list(running.run())
        assert all(group.allocator.num_live == 0 for group in running.scheduler.cache.groups)
        resident[finished] = host_resident()
    grown = resident[max(resident)] - min(size for rows, size in resident.items() if rows >= WARM)
    assert grown < (ROWS - WARM) // 1000 * MIB
