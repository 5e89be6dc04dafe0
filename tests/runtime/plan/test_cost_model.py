"""Predictions (`runtime/plan/cost_model.py`) against what can be worked out by hand, and against the arithmetic of a
pass.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.offload.machine.profile import Overheads
from moedge.quant.matmul import row_layouts
from moedge.quant.native import library
from moedge.runtime.plan.cost_model import MOST_UNHIDDEN, CostModel
from moedge.runtime.plan.placement import DEEP_RING_EXPERTS, Workload, largest_expert
from moedge.runtime.plan.prediction import RESOURCES
from moedge.runtime.plan.rates import SLOW_FLOP_S, Rates, rates_of
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.model_shape import Matrix, ModelShape
from moedge.runtime.shape.shards import model_shards
from support.known_shapes import choose, plain_model

GIB = 1 << 30
NOTHING = Overheads(1e-12, 1e-12, 1e-12, 1e-15, 1e-12, 1e-15)
# Arithmetic that takes no time, so that only reading counts.
INSTANT = Rates(1e9, 1e10, 1e15, NOTHING, {"none": {1: 1e18}}, measured=True)


def test_a_job_that_waits_for_the_disk_takes_its_bytes_over_the_disk_s_rate() -> None:
    job = Workload(64, 64, 64, 64 * 32, 64 * 32)
    choice = choose(plain_model(), Settings(quant="none"), MemoryBudget(3 * GIB), job, INSTANT)
    plan, told = choice.plan, choice.prediction
    assert told.bottleneck == "disk"
    streamed = plan.weights_nbytes - plan.held_nbytes
    # With 30 tokens and more in a pass nearly all of 64 experts are wanted.
    assert told.seconds == pytest.approx(told.disk_nbytes / 1e9)
    assert told.disk_nbytes == pytest.approx(told.passes * streamed, rel=0.02)
    # All start at once or nearly: as many passes as an answer has tokens, and a few for the prompts.
    assert 32 <= told.passes <= 32 + 2 * 64 * 32 / plan.tokens_per_pass + 2
    assert told.generated_tok_s == pytest.approx(64 * 32 / told.seconds)


def test_few_tokens_read_only_the_experts_they_want() -> None:
    job, wanted = Workload(1, 100, 100, 1, 99), Settings(quant="none", kv="bf16")
    told = choose(plain_model(num_layers=15), wanted, MemoryBudget(2 * GIB), job, INSTANT)
    dense = sum(each.numel for each in plain_model().layers[0].dense) * 2 * 15
    unheld = told.plan.weights_nbytes - told.plan.held_nbytes
    unheld -= 0 if told.plan.placement.dense_ring == 0 else dense
    assert told.prediction.disk_nbytes == pytest.approx(told.prediction.passes * unheld * 8 / 64, rel=0.02)


def test_arithmetic_is_counted_by_format_and_rows() -> None:
    rates = Rates(1e15, 1e15, 1e15, NOTHING, {"none": {1: 1e10, 101: 1e12}}, measured=True)
    job = Workload(1, 101, 101, 1, 100)
    choice = choose(plain_model(num_experts=1, per_token=1), Settings(quant="none"), MemoryBudget(64 * GIB), job, rates)
    shape = plain_model(num_experts=1, per_token=1)
    matrices = sum(layer.streamed_numel for layer in shape.layers) + shape.head.numel  # type: ignore[union-attr]
    assert choice.prediction.bottleneck == "compute"
    assert choice.prediction.seconds == pytest.approx(100 * 2 * matrices / 1e10, rel=0.1)


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_more_rows_never_take_less_time_if_none_did_that_was_measured(few: float, more: float) -> None:
    curve = Rates(flop_s={"none": {1: 2e10, 16: 2e11, 256: 1.5e12}}).curve("none")
    few, more = sorted((few, more))
    assert few / curve.at(few) <= more / curve.at(more) * (1 + 1e-9)


def test_what_was_not_measured_is_slow() -> None:
    assert rates_of(None) == Rates()
    assert not rates_of(None).measured
    assert Rates().curve("nf4").at(64) == SLOW_FLOP_S[64]
    assert not rates_of(None, on_device=True).measured


@pytest.mark.parametrize("resource", RESOURCES)
def test_factors_multiply_the_seconds_of_their_resource(resource: str) -> None:
    job, shape = Workload(64, 64, 64, 64 * 32, 64 * 32), plain_model()
    wanted = Settings(quant="none", max_sequences=64, tokens_per_pass=512)
    plain = choose(shape, wanted, MemoryBudget(3 * GIB), job).prediction
    slowed = choose(shape, wanted, MemoryBudget(3 * GIB), job, factors={resource: 3.0}).prediction
    assert slowed.busy_s[resource] == pytest.approx(3 * plain.busy_s[resource])
    assert slowed.seconds >= plain.seconds


def test_a_ring_of_few_experts_makes_disk_and_compute_wait_for_each_other() -> None:
    """A large ring hides the shorter of the two; the cost of a small one is a share of it, and falls as it grows."""
    shape, job = plain_model(), Workload(64, 64, 64, 64 * 32, 64 * 32)
    rates = Rates(1e9, 1e10, 1e15, NOTHING, {"none": {1: 1e12}}, measured=True)
    plan = choose(shape, Settings(quant="none"), MemoryBudget(3 * GIB), job, rates).plan
    costs = CostModel(shape, rates)
    expert = largest_expert(model_shards(shape, plan.quant, plan.dtype))

    def seconds(experts: int) -> float:
        ring = replace(plan, placement=replace(plan.placement, expert_ring=experts * expert))
        return costs.predict(ring, job).seconds

    deep = [seconds(experts) for experts in (DEEP_RING_EXPERTS, 24)]
    shallow = [seconds(experts) for experts in range(3, DEEP_RING_EXPERTS)]
    assert deep[0] == deep[1] < shallow[-1]
    assert shallow == sorted(shallow, reverse=True)
    busy = costs.predict(plan, job).busy_s
    assert shallow[0] <= deep[0] + MOST_UNHIDDEN * min(busy["disk"], busy["compute"])


def test_where_all_prompts_at_once_would_leave_the_ring_no_room_the_plan_takes_them_in_parts() -> None:
    """Scratch of the largest passes would eat the ring, and every pass that decodes would pay for that."""
    rates = Rates(1.7e9, 1e10, 1e11, NOTHING, {"nf4": {1: 1e11, 64: 4e11}}, measured=True)
    job = Workload(128, 32, 32, 128 * 28, 128 * 28)
    plan = choose(plain_model(), Settings(quant="nf4"), MemoryBudget(3 * GIB // 2), job, rates).plan
    assert plan.streams
    assert plan.placement.expert_ring >= DEEP_RING_EXPERTS * largest_expert(
        model_shards(plain_model(), plan.quant, plan.dtype)
    )


def test_every_expert_that_streams_costs_time_besides_its_bytes() -> None:
    shape, job, arrival_s = plain_model(), Workload(64, 64, 64, 64 * 32, 64 * 32), 1e-3
    settings = Settings(quant="none", max_sequences=64, tokens_per_pass=512)
    slow = replace(INSTANT, overheads=replace(NOTHING, arrival_s=arrival_s))
    free, costly = (choose(shape, settings, MemoryBudget(3 * GIB), job, rates).prediction for rates in (INSTANT, slow))
    experts = (costly.busy_s["compute"] - free.busy_s["compute"]) / arrival_s
    # Dense weights are held here, so that what comes from the disk is experts.
    nbytes = largest_expert(model_shards(shape, "none", "bf16"))
    assert experts == pytest.approx(costly.disk_nbytes / nbytes, rel=0.01)


def attention_model() -> ModelShape:
    """Layers with the four projections of attention."""
    shape = plain_model()
    dense = (*shape.layers[0].dense, *(Matrix(name, 512, 2048) for name in ("k_proj", "v_proj")))
    return replace(shape, layers=tuple(replace(layer, dense=dense) for layer in shape.layers))


def test_layers_that_the_library_computes_as_a_whole_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing but experts streams and formats have kernels; the seconds that differ are those of overheads."""
    monkeypatch.setattr(library, "available", lambda: True)
    shape, job = attention_model(), Workload(64, 64, 64, 64 * 32, 64 * 32)
    dear = replace(NOTHING, layer_s=1e-2, expert_s=1e-4)
    instant = {name: {1: 1e18} for name in ("none", "nf4", "fp32")}
    rates = replace(INSTANT, overheads=dear, fused_overheads=NOTHING, flop_s=instant)

    def seconds(ram: int, **settings: str) -> tuple[float, float]:
        """With costs of their own, and without."""
        wanted = Settings(max_sequences=64, tokens_per_pass=512, **settings)  # type: ignore[arg-type]
        both = (rates, replace(rates, fused_overheads=None))
        fused, modules = (choose(shape, wanted, MemoryBudget(ram * GIB), job, each).prediction for each in both)
        return fused.busy_s["compute"], modules.busy_s["compute"]

    fused, modules = seconds(64, quant="nf4")
    passes = 32
    assert modules - fused >= passes * len(shape.layers) * (1e-2 + 8 * 1e-4)
    assert fused < modules / 100
    streamed = seconds(2, quant="nf4")
    assert streamed[0] < streamed[1] / 100
    fused, modules = seconds(64, quant="nf4", dtype="fp32")
    assert fused == modules
    # Floats have kernels with AVX2 alone.
    for reads_floats in (False, True):
        monkeypatch.setattr(row_layouts, "reads_floats", lambda known=reads_floats: known)
        fused, modules = seconds(3, quant="none")
        assert (fused < modules) == reads_floats


def test_the_search_is_not_cut_short_by_the_costs_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a candidate takes at least is never more than what is predicted of it."""
    monkeypatch.setattr(library, "available", lambda: True)
    shape, job = attention_model(), Workload(64, 64, 64, 64 * 32, 64 * 32)
    rates = replace(INSTANT, overheads=replace(NOTHING, layer_s=1e-2), fused_overheads=NOTHING)
    least: list[float] = []
    measure = CostModel.least_seconds

    def noted(self: CostModel, *arguments: Any) -> float:
        least.append(measure(self, *arguments))
        return least[-1]

    monkeypatch.setattr(CostModel, "least_seconds", noted)
    for ram in (2, 3, 64):
        least.clear()
        told = choose(shape, Settings(quant="nf4"), MemoryBudget(ram * GIB), job, rates).prediction
        assert min(least) <= told.total_s * (1 + 1e-9)
