"""The plan's cache: sized by group for the job, its limits known before the run, its passes chosen."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.runtime.errors import DoesNotFit
from moedge.runtime.kv.group import GroupCache
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.plan.cache_size import CacheSize, choose_block
from moedge.runtime.plan.job import JobShape
from moedge.runtime.plan.pass_size import saturating, useful
from moedge.runtime.plan.planner import Plan, Settings, budget_range, make_plan
from moedge.runtime.plan.search import largest
from moedge.runtime.shape.model_shape import ExpertsShape, KVGroup, LayerShape, Matrix, ModelShape

GIB = 1 << 30


def model(num_experts: int = 64, per_token: int = 8, window: int | None = None) -> ModelShape:
    """16 layers of 2048, about 7 GB in bf16 with 64 experts; every other layer has the window."""
    experts = ExpertsShape(num_experts, per_token, Matrix("up", 2048, 2048), Matrix("down", 2048, 1024))
    dense = (Matrix("q", 4096, 2048), Matrix("o", 2048, 4096))
    layers = tuple(LayerShape(index, dense, experts, 10_000) for index in range(16))
    groups = (KVGroup(tuple(range(0, 16, 2)), 4, 128, None), KVGroup(tuple(range(1, 16, 2)), 4, 128, window))
    return ModelShape("qwen3_moe", "bf16", 2048, 32_000, 4096, layers, groups, Matrix("head", 32_000, 2048), 2048)


@given(st.integers(0, 40), st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([None, 1, 16, 128, 1024]))
@settings(max_examples=100, deadline=None)
def test_rows_that_the_plan_says_fit_do_and_longer_ones_do_not(
    gigabytes: int, longest: int, shortest: int, window: int | None
) -> None:
    shape, job = model(window=window), JobShape(40, longest, min(shortest, longest))
    try:
        plan = make_plan(shape, Settings(), int(gigabytes * 0.25 * GIB), job)
    except DoesNotFit:
        assert budget_range(shape, Settings(), replace(job, longest=job.least))[0] > gigabytes * 0.25 * GIB
        return
    assert plan.kv_tokens >= job.least
    fits = [_fits(shape, plan, tokens) for tokens in (job.least, plan.kv_tokens, plan.kv_tokens + 1)]
    assert fits == [True, True, False]
    weights = plan.held_nbytes + plan.placement.dense_ring + plan.placement.expert_ring
    assert weights + plan.kv_nbytes + plan.scratch_nbytes < plan.budget_nbytes


def _fits(shape: ModelShape, plan: Plan, tokens: int) -> bool:
    """As the cache decides it, without the memory."""

    class Pool:
        def __init__(self, spec: KVSpec, count: int) -> None:
            self.spec, self.records = spec, range(count)

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


def test_passes_grow_with_prompts_with_experts_and_with_memory() -> None:
    shape = model()
    chat = JobShape(10_000, 256, 8, 10_000 * 32)
    documents = JobShape(10_000, 2100, 8, 10_000 * 2048)
    tokens = {}
    for name, job in (("chat", chat), ("documents", documents)):
        for budget in (budget_range(shape, Settings("bf16", "none"), job)[0], 64 * GIB):
            plan = make_plan(shape, Settings("bf16", "none"), budget, job)
            tokens[name, plan.streams] = plan.tokens_per_pass
    assert saturating(shape) == 1024
    assert saturating(model(num_experts=256)) == 4096
    assert useful(documents, 128) > useful(chat, 128)
    assert tokens["documents", False] == 1024
    assert tokens["chat", False] <= tokens["documents", False]
    assert tokens["documents", True] < tokens["documents", False]


def test_tokens_per_pass_of_the_user_are_a_fixed_point_and_never_fewer_than_live_sequences() -> None:
    shape, job = model(), JobShape(3000, 100, 8, 3000 * 20)
    assert make_plan(shape, Settings(tokens_per_pass=77), 64 * GIB, job).tokens_per_pass == 77
    assert make_plan(shape, Settings(max_sequences=2000), 64 * GIB, job).tokens_per_pass >= 2000


def test_larger_passes_never_cost_a_sequence_nor_the_weights_their_place() -> None:
    shape, job = model(num_experts=256), JobShape(500, 600, 8, 500 * 500)
    fixed = Settings("bf16", "none", tokens_per_pass=256)
    _, whole = budget_range(shape, fixed, job)
    for extra in (0, 1 << 20, 1 << 26, 1 << 28, 1 << 30, 1 << 34):
        plan = make_plan(shape, Settings("bf16", "none"), whole + extra, job)
        smallest = make_plan(shape, fixed, whole + extra, job)
        assert not plan.streams
        assert plan.kv_sequences == smallest.kv_sequences
    assert plan.tokens_per_pass == 4096


@pytest.mark.parametrize(("limit", "setting"), [("--tokens-per-pass", {"tokens_per_pass": 0})])
def test_nonsense_is_refused(limit: str, setting: dict[str, int]) -> None:
    from moedge.runtime.errors import SettingError

    with pytest.raises(SettingError, match=limit):
        make_plan(model(), Settings(**setting), 64 * GIB, JobShape(1, 10))
