"""Sequences whose keys and values lie in host memory (`runtime/kv/host.py`) give the tokens of those on the device, and
their bytes cross the link as planned.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from moedge.runtime.kv.cohorts import CohortSizes
from moedge.runtime.kv.spec import KVSpec

LENGTHS, NEW_TOKENS, BLOCK = (10, 21, 7, 13, 18, 11), 7, 4


def many(tiny: Any, kv: str = "fp32") -> Any:
    settings = replace(tiny.settings, kv=kv, max_sequences=len(LENGTHS))
    return replace(tiny, settings=settings, lengths=LENGTHS, new_tokens=NEW_TOKENS)


def hosted(tiny: Any, plan: Any, on_device: int, cohorts: int, each: int) -> Any:
    """The plan with blocks for some sequences on the device and `each` in every one of `cohorts`, at their longest."""
    specs = [KVSpec(group, plan.kv, BLOCK) for group in tiny.source.shape.kv_groups]

    def blocks(sequences: int) -> tuple[int, ...]:
        return tuple(sequences * spec.blocks_for(tiny.job.longest) for spec in specs)

    sizes = CohortSizes.of(specs, cohorts, cohorts * each, blocks(each), plan.tokens_per_pass) if cohorts else None
    return replace(
        plan, kv_block=BLOCK, kv_blocks=blocks(on_device), kv_sequences=on_device, max_sequences=6, host_kv=sizes
    )


@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("on_device", [1, 3], ids=["one on the device", "half"])
def test_tokens_are_those_of_a_cache_on_the_device(on_device: int, kv: str, case: Any, fakes: ModuleType) -> None:
    tiny = many(case("qwen3_moe"), kv)
    fake = fakes.FakeDevice(seed=on_device)
    plan = replace(tiny.plan(fake.device, 0.0), max_sequences=6)
    with fake:
        wanted = tiny.run(hosted(tiny, plan, 6, 0, 0), fake.device)
        ran = tiny.run(hosted(tiny, plan, on_device, 2, 3), fake.device)
    assert ran.tokens == wanted.tokens
    assert ran.passes <= wanted.passes + 1
