"""What passes cost beside their products (`runtime/calibration/pass_rates.py`), recovered from passes whose cost is
known.
"""

from dataclasses import astuple, replace
from importlib.resources import as_file, files
from typing import Any

import pytest

from moedge.moe.expected_rows import expected_union
from moedge.offload.machine.profile import Overheads
from moedge.quant.native import library
from moedge.runtime.calibration import pass_rates
from moedge.runtime.calibration.pass_rates import LEAST_S, PASS_TOKENS, Timed, solve_overheads, streaming, timed_passes
from moedge.runtime.calibration.pass_rates import PASS_KINDS as MEASURED
from moedge.runtime.loading.engine_loader import LoadedEngine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source
from support.known_shapes import plain_model

SHAPE = plain_model()
TRUE = Overheads(2e-3, 5e-5, 1e-5, 2e-6, 3e-4, 7e-5)
KINDS = ((16, 1), (1, 1), (128, 8), (8, 8), (4096, 64), (64, 64))


def timed(tokens: int, sequences: int, streamed: bool, true: Overheads = TRUE) -> Timed:
    experts = SHAPE.layers[0].experts
    assert experts is not None
    wanted = expected_union(experts.count, experts.per_token, tokens)
    seconds = true.layer_s + true.expert_s * wanted + true.sequence_s * sequences
    seconds += true.token_s * tokens + streamed * true.arrival_s * wanted
    outside = true.schedule_s * sequences
    return Timed(tokens, sequences, streamed, len(SHAPE.layers) * seconds + outside, outside)


def test_costs_are_recovered_and_arrivals_kept_apart() -> None:
    passes = [timed(*kind, streamed) for kind in KINDS for streamed in (False, True)]
    assert astuple(solve_overheads(SHAPE, passes)) == pytest.approx(astuple(TRUE), rel=1e-4)


def test_a_layer_costs_as_it_starts_kernels() -> None:
    """On a GPU those that only decode start fewer."""
    passes = []
    for kind in KINDS:
        one, launches = timed(*kind, streamed=False), 0.8 if kind[0] == kind[1] else 1.0
        fewer = (1 - launches) * len(SHAPE.layers) * TRUE.layer_s
        passes.append(replace(one, launches=launches, seconds=one.seconds - fewer))
    assert solve_overheads(SHAPE, passes).layer_s == pytest.approx(TRUE.layer_s, rel=1e-4)


def test_what_streaming_costs_does_not_change_what_other_passes_cost() -> None:
    dear = replace(TRUE, arrival_s=1e-2)
    found = solve_overheads(SHAPE, [timed(*kind, streamed, dear) for kind in KINDS for streamed in (False, True)])
    assert found.layer_s == pytest.approx(TRUE.layer_s, rel=1e-4)


def test_a_cost_that_noise_made_negative_is_none() -> None:
    passes = [timed(*kind, streamed) for kind in KINDS for streamed in (False, True)]
    faster = [
        replace(one, seconds=one.seconds / 100, outside_s=one.outside_s / 100) if one.streamed else one
        for one in passes
    ]
    assert solve_overheads(SHAPE, faster).arrival_s == LEAST_S


def test_the_streaming_plan_holds_no_expert_and_every_dense_shard() -> None:
    plan = make_plan(SHAPE, Settings(quant="none"), MemoryBudget(64 << 30), Workload(4, 64))
    place = streaming(SHAPE, plan).placement
    assert not plan.streams
    assert place.held_dense == len(SHAPE.layers)
    assert not any(place.held_experts)
    assert place.expert_ring > 0


def test_without_streamed_passes_the_other_costs_are_the_same() -> None:
    found = solve_overheads(SHAPE, [timed(*kind, streamed=False) for kind in KINDS])
    assert astuple(found) == pytest.approx(astuple(replace(TRUE, arrival_s=LEAST_S)), rel=1e-4)


@pytest.mark.slow
def test_every_prompt_is_computed_each_time() -> None:
    """The cache would find prompts that it has seen: passes of prompts would have hardly a token."""
    with as_file(files("moedge.demo")) as bundle, open_source(str(bundle / "model")) as source:
        settings = Settings(quant="none", tokens_per_pass=PASS_TOKENS)
        plan = make_plan(source.shape, settings, MemoryBudget(2 << 30), Workload(64, 128))
        passes = list(timed_passes(source, plan, None))
    assert max(one.tokens for one in passes) == max(count * length for count, length in MEASURED)
    assert {one.tokens for one in passes if one.tokens == one.sequences} == {count for count, _ in MEASURED}


def test_layers_that_the_library_computes_as_a_whole_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where an engine has such layers; their passes are those of the other measurement."""
    loaded: list[LoadedEngine] = []
    load = pass_rates.load_engine

    def noted(*arguments: Any) -> LoadedEngine:
        loaded.append(load(*arguments))
        return loaded[-1]

    monkeypatch.setattr(pass_rates, "load_engine", noted)
    monkeypatch.setattr(pass_rates, "PASS_KINDS", MEASURED)
    found = pass_rates.measure_fused_overheads()
    assert (found is not None) == any(each.fused for each in loaded)
    if library.available():
        assert found is not None
        assert min(astuple(found)) >= LEAST_S
    monkeypatch.setattr(library, "available", lambda: False)
    assert pass_rates.measure_fused_overheads() is None
