"""Plans that keep sequences in host memory (`runtime/plan/hosting.py`), for cards of data sheets: predictions."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.hosting import rooms
from moedge.runtime.plan.plan_file import load_plan
from moedge.runtime.plan.planner import WORTH_STREAMING, PlanResult, SearchSpace, solve
from moedge.runtime.settings.errors import DoesNotFit, SettingError
from moedge.runtime.settings.settings import Settings
from moedge.what_if import document
from support.plans_page import GIB, question

CARD, RAM = "RTX 4060 8GB", 24


def chosen(name: str, quant: str = "nf4", kv: str = "int4", host_kv: str = "auto", ram: int = RAM) -> PlanResult:
    return solve(question(name, CARD, ram, Settings(quant=quant, kv=kv, host_kv=host_kv)))


@pytest.mark.parametrize(
    ("name", "kv", "tok_s", "gain"),
    [
        ("Qwen3-30B-A3B", "int4", 350, 1.5),
        ("Qwen3-30B-A3B", "int8", 200, 1.5),
        ("Qwen3-235B-A22B", "int4", 15, 3.5),
        ("GLM-4.5-Air", "int4", 34.5, 2.5),
    ],
)
def test_a_small_card_gains_from_sequences_in_host_memory(name: str, kv: str, tok_s: float, gain: float) -> None:
    hosted, without = chosen(name, kv=kv), chosen(name, kv=kv, host_kv="off")
    assert without.plan.host_kv is None
    assert hosted.prediction.generated_tok_s >= max(tok_s, gain * without.prediction.generated_tok_s)
    for tier in hosted.ledger.tiers.values():
        assert tier.budget is None or tier.planned <= tier.budget


@pytest.mark.parametrize("ram", [24, 32, 64])
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "gpt-oss-20b"])
def test_host_memory_is_taken_where_it_gains(name: str, ram: int) -> None:
    quant = "auto" if name.startswith("gpt") else "int4"
    hosted, without = chosen(name, quant, ram=ram), chosen(name, quant, host_kv="off", ram=ram)
    assert hosted.prediction.total_s <= without.prediction.total_s * WORTH_STREAMING
    if hosted.plan.host_kv is not None:
        assert hosted.prediction.total_s * WORTH_STREAMING <= without.prediction.total_s * (1 + 1e-9)


@pytest.mark.parametrize("sequences", [32, 65, 95, 158])
def test_where_a_budget_has_room_a_larger_one_has(sequences: int) -> None:
    """Of a dense model, whatever cohorts' sizes: the search ends at the first number of sequences without room."""
    request = question("Qwen3-30B-A3B", CARD, RAM, Settings(quant="nf4", kv="int8"))
    layers = tuple(replace(layer, experts=None) for layer in request.shape.layers)
    costs = CostModel(replace(request.shape, layers=layers), request.costs.rates)
    space = SearchSpace(replace(request, costs=costs))
    candidate = space.candidate("nf4", tokens=512, live=sequences)
    first = candidate.fixed + candidate.weights.streaming_nbytes
    budgets = range(first, first + 2 * GIB, 4 << 20)
    found = [list(rooms(candidate, sequences, budget, RAM * GIB)) for budget in budgets]
    assert not found[0]
    assert found[-1]
    assert all(after for before, after in pairwise(found) if before)
    for budget, ways in zip(budgets, found, strict=True):
        for room in ways:
            there, windows = (each.sequences, each.device_nbytes) if (each := room.host_kv) else (0, 0)
            kv = candidate.cache.nbytes_of(room.blocks)
            assert room.free_nbytes == budget - candidate.fixed - kv - windows >= candidate.weights.streaming_nbytes
            assert room.cached + there == sequences


@pytest.mark.parametrize("size", ["2GiB", "10%"])
def test_a_size_is_a_limit(size: str) -> None:
    found = chosen("Qwen3-30B-A3B", host_kv=size).plan.host_kv
    assert found is not None
    assert 0 < found.host_nbytes <= (2 * GIB if size == "2GiB" else RAM * GIB // 10)


def test_what_cannot_be_page_locked_is_not_planned() -> None:
    """As under WSL2, which locks about a GiB."""
    request = question("Qwen3-30B-A3B", CARD, RAM, Settings(quant="nf4", kv="int4"))
    rates = replace(request.costs.rates, pin_nbytes=GIB)
    found = solve(replace(request, costs=CostModel(request.shape, rates))).plan.host_kv
    assert found is None or found.host_nbytes <= GIB


def test_a_processor_has_its_sequences_in_host_memory_already() -> None:
    request = question("Qwen3-30B-A3B", CARD, RAM, Settings(quant="int4", kv="int8"))
    with pytest.raises(DoesNotFit):
        solve(replace(request, budget=replace(request.budget, device=None, host_nbytes=GIB // 2)))
    found = solve(replace(request, budget=replace(request.budget, device=None)))
    assert found.plan.host_kv is None


def test_a_saved_plan_keeps_no_more_in_host_memory_than_is_asked_for(tmp_path: Path) -> None:
    found, path = chosen("Qwen3-30B-A3B"), tmp_path / "plan.json"
    path.write_text(json.dumps(document("a model", found, [], [], 0)))
    assert load_plan(path, found.request) == found.plan
    for size in ("off", "1GiB"):
        with pytest.raises(SettingError, match=rf"keys and values in host memory, and --host-kv {size} was asked for"):
            load_plan(path, found.request.with_settings(host_kv=size))
