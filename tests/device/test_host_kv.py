"""Sequences whose keys and values lie in host memory (`runtime/kv/host.py`) give the tokens of those on the device, and
their bytes cross the link as planned.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.offload.stream.stream import StreamBroken
from moedge.runtime.loading.engine_loader import load_engine, load_with_fallback
from moedge.runtime.plan.cost_model import CostModel, _decoding
from moedge.runtime.plan.fallback import FallbackPolicy
from moedge.runtime.plan.planner import PlanRequest
from moedge.runtime.settings.errors import MemoryGaveOut

# By where sequences lie: blocks for so many on the device, and cohorts with room for so many each.
WHERE = {"none": (6, 0, 0), "half": (3, 2, 2), "all but one": (1, 3, 2)}


def check(ran: Any, wanted: Any, there: bool) -> None:
    assert ran.tokens == wanted.tokens
    assert (ran.read, ran.written) == (ran.expected_read, ran.expected_written)
    assert ran.attended == ran.expected_attended
    assert (ran.written > 0) == there
    # Where the CPU attends and no prompt is divided, nothing need cross.
    assert (ran.read > 0) == there or ran.attended


@pytest.mark.sample("half-qwen3_moe-int8-part", "half-deepseek_v3-fp32-part", "half-gpt_oss-fp32-part")
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["part", "held"])
@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8", "int4", "int8/int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3_text", "deepseek_v3", "qwen3_next", "llama"])
@pytest.mark.parametrize("where", list(WHERE))
def test_tokens_are_those_of_a_cache_on_the_device(
    where: str, family: str, kv: str, share: float, case: Any, fakes: ModuleType, host_kv: ModuleType
) -> None:
    """Sinks and windows are gpt_oss's and gemma3_text's, latents deepseek_v3's, states qwen3_next's."""
    tiny = host_kv.many(case(family), kv)
    wanted = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6))
    fake = fakes.FakeDevice(seed=len(family))
    plan = host_kv.hosted(tiny, tiny.plan(fake.device, share), *WHERE[where])
    with fake:
        ran = host_kv.run(tiny, plan, fake.device)
    check(ran, wanted, where != "none")
    assert ran.passes <= wanted.passes + 2


@pytest.mark.sample("all but one-gpt_oss-int8", "half-qwen3_moe-fp32", "half-gemma3_text-int4")
@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8", "int4", "int8/int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3_text", "qwen3_next", "llama"])
@pytest.mark.parametrize("where", ["half", "all but one"])
def test_tokens_are_those_of_the_device_where_the_processor_attends(
    where: str, family: str, kv: str, case: Any, fakes: ModuleType, host_kv: ModuleType
) -> None:
    """To cohorts that generate; those with prompts cross the link."""
    tiny = host_kv.many(case(family), kv)
    wanted = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6))
    fake = fakes.FakeDevice(seed=len(family))
    plan = host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), *WHERE[where], here=True)
    with fake:
        ran = host_kv.run(tiny, plan, fake.device)
    check(ran, wanted, True)
    assert ran.attended > 0
    assert ran.passes <= wanted.passes + 2


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
def test_tokens_are_those_of_transformers(
    family: str, case: Any, stock: Any, checkpoint: Any, fakes: ModuleType, host_kv: ModuleType
) -> None:
    """In float32, without moedge beside it; gemma3_text has sliding windows, which its longest row is longer than."""
    tiny = host_kv.many(case(family))
    fake = fakes.FakeDevice(seed=9)
    plan = host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), 1, 3, 2)
    with fake:
        ran = host_kv.run(tiny, plan, fake.device)
    assert ran.read == ran.expected_read > 0
    model = stock(checkpoint(family))
    windows = [group.window for group in tiny.source.shape.kv_groups if group.window]
    assert bool(windows) == (family == "gemma3_text")
    assert all(window < max(tiny.lengths) for window in windows)
    greedy = {"max_new_tokens": tiny.new_tokens, "eos_token_id": -1, "do_sample": False}
    for prompt, found in zip(tiny.prompts, ran.tokens, strict=True):
        assert found == model.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :].tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kv", ["fp32", "int4"])
@pytest.mark.parametrize("tiers", ["three tiers", "nothing else pinned"])
def test_weights_may_lie_anywhere(tiers: str, kv: str, case: Any, fakes: ModuleType, host_kv: ModuleType) -> None:
    tiny = host_kv.many(case("qwen3_moe"), kv)
    wanted = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6))
    fake = fakes.FakeDevice()
    plan = tiny.three_tiers(fake.device) if tiers == "three tiers" else tiny.plan(fake.device, 0.0)
    plan = host_kv.hosted(tiny, plan, 2, 2, 2)
    if tiers != "three tiers":
        fake = fakes.FakeDevice(pin_limit=plan.host_kv.host_nbytes + (1 << 20))
    with fake:
        ran = host_kv.run(tiny, plan, fake.device)
    check(ran, wanted, True)
    assert not fake.cuda.registered, "something stayed pinned"


@pytest.mark.sample("fp32-moved", "int8-preempted")
@pytest.mark.parametrize("room", ["moved", "preempted"])
@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_sequences_that_find_no_block_move_or_wait(
    room: str, kv: str, case: Any, fakes: ModuleType, host_kv: ModuleType
) -> None:
    """Where a cohort is full its youngest sequence moves to another one with its blocks, or begins again later."""
    tiny = host_kv.many(case("qwen3_moe"), kv)
    wanted = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6))
    fake = fakes.FakeDevice(seed=3)
    plan = tiny.plan(fake.device, 0.0)
    sizes = (1, 2, 3) if room == "moved" else (1, 2, 1.4)
    with fake:
        ran = host_kv.run(tiny, host_kv.hosted(tiny, plan, *sizes), fake.device)
    check(ran, wanted, True)
    assert ran.moved > 0
    assert (ran.preemptions > 0) == (room == "preempted")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_prefixes_are_shared_within_a_cohort(family: str, case: Any, fakes: ModuleType, host_kv: ModuleType) -> None:
    tiny = replace(host_kv.many(case(family)), lengths=(17, 21, 14, 13, 18, 15))
    alone = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6), alike=host_kv.ALIKE)
    fake = fakes.FakeDevice(seed=5)
    plan = host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), 1, 2, 3)
    with fake:
        ran = host_kv.run(tiny, plan, fake.device, alike=host_kv.ALIKE)
    check(ran, alone, True)
    assert ran.prefix_hits > 0


def test_a_pass_moves_what_the_plan_says_within_its_memory(case: Any, fakes: ModuleType, host_kv: ModuleType) -> None:
    """Weights and keys of a pass in which all sequences decode; device memory and page-locked memory at their peaks."""
    tiny = host_kv.many(case("llama"), "int8")
    fake = fakes.FakeDevice(seed=6)
    plan = host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), 2, 2, 2)
    costs = CostModel(tiny.source.shape).pass_costs(plan)
    planned = costs.cost(_decoding(tiny.job, len(host_kv.LENGTHS))).link_nbytes
    fake.device.limit(plan.used_nbytes - plan.process_nbytes)
    # The rings of weights, of which the plan knows, and one of parameters.
    fake.device.pins.most = plan.host_kv.host_nbytes + plan.staging.staged_nbytes + (8 << 20)
    moved: list[int] = []

    def counting(loaded: Any) -> None:
        forward = loaded.model.forward

        def counted(batch: Any) -> torch.Tensor:
            before = loaded.streamed.nbytes_to_device + loaded.host_kv.nbytes_read
            logits = forward(batch)
            cohorts = {chunk.sequence.table.cohort for chunk in batch.chunks}
            if len(batch.chunks) == len(host_kv.LENGTHS) == batch.num_tokens and len(cohorts) == 3:
                moved.append(loaded.streamed.nbytes_to_device + loaded.host_kv.nbytes_read - before)
            return logits

        object.__setattr__(loaded.model, "forward", counted)

    with fake:
        host_kv.run(tiny, plan, fake.device, loaded_now=counting)
    assert moved
    assert set(moved) == {planned}
    assert fake.device.peak <= plan.used_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
def test_kernels_read_windows_and_write_what_is_new(
    kv: str, family: str, case: Any, fakes: ModuleType, host_kv: ModuleType
) -> None:
    """Triton's, in its interpreter."""
    tiny = host_kv.many(case(family), kv)
    tiny = replace(tiny, lengths=(5, 9, 7), new_tokens=3)
    fakes_device = fakes.FakeDevice(seed=1, capability=(8, 0))
    plan = host_kv.hosted(tiny, tiny.plan(fakes_device.device, 0.0), 3)
    assert plan.attention == "triton"
    with fakes_device:
        wanted = host_kv.run(tiny, plan, fakes_device.device)
    fake = fakes.FakeDevice(seed=2, capability=(8, 0))
    plan = host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), 1, 2, 1)
    with fake:
        ran = host_kv.run(tiny, plan, fake.device)
    check(ran, wanted, True)
    assert fake.launched


def _failing(fails: bool) -> Any:
    """The second pass finds no memory in its second layer, once."""

    def plant(loaded: Any) -> None:
        attention, calls = loaded.model.attention, 0
        attend = attention.device.attend

        def attending(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if fails and calls == 6:
                raise torch.OutOfMemoryError("out of memory")
            return attend(*args)

        attention.device.attend = attending
        loaded.engine.split_retry.fall_back = lambda cause, tokens: None

    return plant


def test_a_pass_that_failed_is_repeated(case: Any, fakes: ModuleType, host_kv: ModuleType) -> None:
    tiny = host_kv.many(case("llama"))
    wanted = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6))
    fake = fakes.FakeDevice(seed=4)
    plan = host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), 2, 2, 2)
    with fake:
        ran = host_kv.run(tiny, plan, fake.device, loaded_now=_failing(True))
    assert ran.tokens == wanted.tokens


def test_fewer_cohorts_are_left_where_less_is_page_locked(case: Any, fakes: ModuleType, host_kv: ModuleType) -> None:
    tiny = host_kv.many(case("llama"))
    wanted = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6))
    plan = host_kv.hosted(tiny, tiny.plan(fakes.FakeDevice().device, 0.0), 2, 4, 1)
    fake = fakes.FakeDevice(pin_limit=plan.host_kv.host_nbytes - 1)
    request = PlanRequest(
        costs=CostModel(tiny.source.shape), workload=tiny.job, budget=plan.budget, settings=tiny.settings
    )
    policy = FallbackPolicy(plan, request)
    with fake:
        loaded = load_with_fallback(lambda left: load_engine(tiny.source, left, tiny.store, fake.device), policy)
        loaded.close()
        assert [str(each) for each in policy.applied] == [
            f"out of memory ({policy.applied[0].cause}): cohorts in host memory 4 -> 2"
        ]
        ran = host_kv.run(tiny, policy.plan, fake.device)
    check(ran, wanted, True)


def bugs() -> list[str]:
    from support.device.host_kv import BUGS

    return list(BUGS)


@pytest.mark.sample(
    "late write-back",
    "last token stale",
    "table of another cohort",
    "moved without waiting",
    "attended before it settled",
)
@pytest.mark.parametrize("bug", bugs())
def test_a_bug_on_the_way_is_found(
    bug: str, case: Any, fakes: ModuleType, host_kv: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: tokens or bytes differ, or what compute read was overwritten, within a few schedules."""
    plant, needs = host_kv.BUGS[bug]
    tiny = host_kv.many(case("llama"), "int8" if needs == "offsets" else "fp32")
    wanted = host_kv.run(tiny, host_kv.hosted(tiny, tiny.plan(None), 6))
    plant(monkeypatch)
    sizes = (1, 2, 3) if needs == "moves" else (2, 2, 2)
    for seed in range(6):
        fake = fakes.FakeDevice(seed)
        try:
            with fake:
                plan = host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), *sizes, here=needs == "here")
                ran = host_kv.run(tiny, plan, fake.device, loaded_now=_failing(needs == "fails"))
                if ran.tokens != wanted.tokens or (ran.read, ran.written) != (ran.expected_read, ran.expected_written):
                    return
        except (fakes.simulator.Race, StreamBroken, MemoryGaveOut, RuntimeError, IndexError, ValueError):
            return
    pytest.fail(f"nobody noticed: {plant.__doc__}")
