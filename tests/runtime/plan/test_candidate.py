"""The KV cache of a plan (`runtime/plan/candidate.py`): sized by group for the job, its limits known before the run."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.runtime.kv.allocator import GroupCache
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.plan.candidate import CacheSize, choose_block, largest
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.settings.errors import DoesNotFit
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.model_shape import KVGroup, ModelShape
from support.known_shapes import plain_model

GIB = 1 << 30


@pytest.mark.sample("10-nf4")
@pytest.mark.parametrize("quant", ["auto", "nf4"])
@pytest.mark.parametrize("examples", [10, 40])
def test_rows_that_the_plan_says_fit_do_and_longer_ones_do_not(examples: int, quant: str) -> None:
    wanted = Settings(quant=quant)

    @given(st.integers(0, 40), st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([None, 1, 16, 128, 1024]))
    @settings(max_examples=examples, deadline=None)
    def hold(gigabytes: int, longest: int, shortest: int, window: int | None) -> None:
        shape, job = plain_model(window=window), Workload(40, longest, min(shortest, longest))
        try:
            plan = make_plan(shape, wanted, MemoryBudget(int(gigabytes * 0.25 * GIB)), job)
        except DoesNotFit:
            assert budget_range(shape, wanted, replace(job, longest=job.least))[0] > gigabytes * 0.25 * GIB
            return
        assert plan.kv_tokens >= job.least
        fits = [_fits(shape, plan, tokens) for tokens in (job.least, plan.kv_tokens, plan.kv_tokens + 1)]
        assert fits == [True, True, False]
        assert plan.used_nbytes <= plan.budget.host_nbytes

    hold()


def _fits(shape: ModelShape, plan: Plan, tokens: int) -> bool:
    """As the cache decides it, without the memory."""

    class Pool:
        def __init__(self, spec: KVSpec, count: int) -> None:
            self.spec, self.memory = spec, range(count)

    specs = [KVSpec(group, plan.kv, plan.kv_block) for group in shape.kv_groups]
    return all(GroupCache(Pool(*each)).fits(tokens) for each in zip(specs, plan.kv_blocks, strict=True))


def test_a_group_with_a_window_needs_the_windows_and_a_pass_whatever_the_length() -> None:
    specs = tuple(KVSpec(KVGroup((0,), 1, 64, window), "bf16") for window in (None, 128))
    assert CacheSize(specs, 4096, 1024).blocks(10) == (1280, 10 * 5 + 32)
    assert CacheSize(specs, 40_000, 1024).blocks(10)[1] == 10 * 5 + 32
    assert CacheSize(specs, 64, 1024).blocks(10) == (20, 20), "never more than the texts themselves"


def test_blocks_are_small_where_texts_are_short() -> None:
    assert [choose_block(mean) for mean in (20, 60, 130, 300, 600, 5000)] == [4, 4, 8, 16, 32, 32]


@given(st.integers(1, 5000), st.integers(0, 6000))
def test_the_largest_number_for_which_a_condition_holds(most: int, end: int) -> None:
    assert largest(most, lambda number: number <= end) == max(1, min(most, end))
