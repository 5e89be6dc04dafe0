"""Plans with experts on the CPU (`runtime/plan/cpu_experts.py`), for cards of data sheets: predictions."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moedge.moe.division import MOST_TOKENS, ExpertSeconds, divide
from moedge.moe.expected_rows import expected_union, wanted_by, wanted_rows
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.cpu_experts import DividedExperts, expert_seconds, host_nbytes
from moedge.runtime.plan.memory_ledger import CPU_EXPERTS
from moedge.runtime.plan.plan_file import load_plan
from moedge.runtime.plan.planner import WORTH_STREAMING, PlanResult, solve
from moedge.runtime.settings.settings import Settings
from moedge.runtime.shape.shards import model_shards
from moedge.what_if import document
from support.plans_page import question

CARD, NAME = "RTX 4060 8GB", "Qwen3-30B-A3B"


def chosen(sequences: int, card: str = CARD, ram: int = 24, **settings: Any) -> PlanResult:
    found = Settings(**{"quant": "int4", "kv": "int8", "max_sequences": sequences, **settings})
    return solve(question(NAME, card, ram, found))


@pytest.mark.parametrize("quant", ["int4", "int8", "nf4", "mxfp4"])
@pytest.mark.parametrize("sequences", [1, 7, 64])
def test_few_sequences_gain_from_the_cpu(sequences: int, quant: str) -> None:
    ram = 64 if quant == "int8" else 24
    divided, without = (chosen(sequences, ram=ram, quant=quant, cpu_experts=each) for each in ("auto", "off"))
    assert without.plan.cpu_experts is None
    assert without.prediction.busy_s["cpu"] == without.prediction.cpu_experts == 0
    assert divided.plan.cpu_experts is not None
    assert divided.prediction.cpu_experts > 0
    assert divided.prediction.total_s * WORTH_STREAMING <= without.prediction.total_s
    assert divided.prediction.link_nbytes < without.prediction.link_nbytes
    host = divided.ledger.tiers["host"]
    assert host.arenas[CPU_EXPERTS].planned == host_nbytes(divided.request.shape, divided.plan.dtype)
    assert host.planned <= (host.budget or 0)


@pytest.mark.parametrize(
    ("card", "settings"),
    [
        (CARD, {"cpu_experts": "off"}),
        (CARD, {"deterministic": True}),
        # Every pass has more tokens than the CPU has memory for.
        (CARD, {"max_sequences": 480}),
        # All experts are held, whatever the CPU could do.
        ("RTX 5090 32GB", {}),
    ],
)
def test_nothing_is_divided_where_something_forbids_it(card: str, settings: dict[str, Any]) -> None:
    assert chosen(**{"sequences": 8, "card": card, **settings}).plan.cpu_experts is None


def chosen_with(**rates: Any) -> PlanResult:
    request = question(NAME, CARD, 24, Settings(quant="int4", kv="int8", max_sequences=8))
    return solve(replace(request, costs=CostModel(request.shape, replace(request.costs.rates, **rates))))


def test_a_cpu_of_which_nothing_is_known_computes_nothing() -> None:
    assert chosen_with(cores=0).plan.cpu_experts is None


def test_memory_that_copies_use_up_leaves_the_cpu_nothing() -> None:
    assert chosen_with(ram_bytes_s=1.3e10).plan.cpu_experts is None


def test_a_faster_memory_and_more_cores_never_take_longer() -> None:
    for rates in ([{"ram_bytes_s": each} for each in (2e10, 4e10, 6e10, 1e11)], [{"cores": n} for n in (2, 4, 8, 32)]):
        found = [chosen_with(**each).prediction.total_s for each in rates]
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(found))


@pytest.mark.parametrize("sequences", [1, 7, 64])
def test_speed_grows_with_the_budget_of_the_card(sequences: int) -> None:
    settings = Settings(quant="nf4", kv="int8", max_sequences=sequences)
    budgets = [f"{tenths / 10}GiB" for tenths in range(20, 76, 5)]
    found = [solve(question("gpt-oss-20b", CARD, 64, settings, gpu_mem=each)) for each in budgets]
    assert any(each.plan.cpu_experts for each in found)
    for before, after in pairwise(found):
        assert after.prediction.total_s <= before.prediction.total_s * (1 + 1e-9)


def test_orders_that_no_kernel_reads_are_not_divided() -> None:
    request = question(NAME, CARD, 24)
    assert expert_seconds(request.shape, "int4", "bf16", request.costs.rates) is not None
    assert expert_seconds(request.shape, "int3", "bf16", request.costs.rates) is None


@pytest.mark.parametrize("tokens", [1, 5, 33, MOST_TOKENS])
def test_the_plan_divides_as_the_engine_does(tokens: int) -> None:
    """Layer by layer, by the same function, of experts that are wanted as often as is expected."""
    result = chosen(8)
    shape, plan, seconds = result.request.shape, result.plan, result.plan.cpu_experts
    assert seconds is not None
    shards = model_shards(shape, plan.quant, plan.dtype)
    experts = 0.0
    for layer, held in zip(shape.layers, plan.placement.held_experts, strict=True):
        assert layer.experts is not None
        share = layer.experts.per_token / layer.experts.count
        wanted = (layer.experts.count - held) * wanted_by(tokens, share)
        few, many = (divide(wanted_rows(tokens, share, int(wanted) + more), seconds)[0] for more in (0, 1))
        experts += few + (many - few) * (wanted % 1)
    assert DividedExperts(shards, plan.placement, seconds).of(tokens).experts == pytest.approx(experts)
    assert DividedExperts(shards, plan.placement, seconds).of(MOST_TOKENS + 1).experts == 0


@pytest.mark.parametrize("tokens", [1, 3, 40, 128])
def test_experts_are_wanted_as_often_as_is_expected(tokens: int) -> None:
    wanted = expected_union(tokens, 8, 128)
    rows = wanted_rows(tokens, 8 / 128, round(wanted))
    assert list(rows) == sorted(rows)
    assert len(rows) == round(wanted)
    assert sum(rows) == pytest.approx(8 * tokens, rel=0.05)


def test_a_saved_plan_keeps_its_division_unless_it_is_turned_off(tmp_path: Path) -> None:
    result = chosen(8)
    (tmp_path / "plan.json").write_text(json.dumps(document(NAME, result, [], [], 0)))
    assert load_plan(tmp_path / "plan.json", result.request).cpu_experts == result.plan.cpu_experts
    off = load_plan(tmp_path / "plan.json", result.request.with_settings(cpu_experts="off"))
    assert (off.cpu_experts, off.cpu_experts_nbytes) == (None, 0)


def test_the_document_says_what_off_would_give() -> None:
    found = document(NAME, chosen(8), [], [], 0)
    assert found["without_cpu_experts"] == chosen(8, cpu_experts="off").prediction.generated_tok_s
    assert document(NAME, chosen(8, cpu_experts="off"), [], [], 0)["without_cpu_experts"] is None


def test_an_expert_is_never_divided_by_a_cpu_that_takes_longer_than_the_link() -> None:
    assert divide([1, 1], ExpertSeconds(1.0, 5.0, 5.0, 0.0)) == (0, 2.0)
