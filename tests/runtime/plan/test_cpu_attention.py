"""Plans whose CPU attends to sequences in host memory (`runtime/plan/cpu_attention.py`), for cards of data sheets:
predictions.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.cpu_attention import CPUAttention
from moedge.runtime.plan.plan_file import load_plan
from moedge.runtime.plan.planner import PlanResult, solve
from moedge.runtime.settings.settings import Settings
from moedge.runtime.shape.model_shape import KVGroup
from moedge.what_if import document
from support.plans_page import question

CARD, NAME = "RTX 4060 8GB", "Qwen3-30B-A3B"


def chosen(name: str = NAME, rates: dict[str, Any] | None = None, **settings: Any) -> PlanResult:
    request = question(name, CARD, 24, Settings(**{"quant": "nf4", "kv": "int8", **settings}))
    return solve(replace(request, costs=CostModel(request.shape, replace(request.costs.rates, **(rates or {})))))


def rows_nbytes(result: PlanResult) -> int:
    return result.plan.host_kv.rows_nbytes if result.plan.host_kv else 0


@pytest.mark.parametrize(("kv", "gain"), [("int8", 1.3), ("int4", 1.15)])
def test_many_sequences_in_host_memory_gain_from_the_cpu(kv: str, gain: float) -> None:
    attended, crossing = (chosen(kv=kv, cpu_attention=each) for each in ("auto", "off"))
    assert rows_nbytes(crossing) == crossing.prediction.busy_s["cpu"] == 0
    # Queries of 32 heads of 128 in bfloat16.
    assert rows_nbytes(attended) == attended.plan.tokens_per_pass * 32 * 128 * 2
    assert attended.prediction.generated_tok_s > gain * crossing.prediction.generated_tok_s
    for tier in attended.ledger.tiers.values():
        assert tier.budget is None or tier.planned <= tier.budget


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"deterministic": True}, {}),
        ({}, {"cores": 0}),
        # Copies take all that the memory gives.
        ({}, {"ram_bytes_s": 1.2e10}),
    ],
)
def test_all_cohorts_cross_the_link_where_something_forbids_it(settings: dict[str, Any], rates: dict[str, Any]) -> None:
    assert rows_nbytes(chosen(rates=rates, **settings)) == 0


def test_latents_cross_the_link() -> None:
    """The CPU has no kernel that attends to them with a processor's threads alone."""
    assert rows_nbytes(chosen("DeepSeek-V2-Lite")) == 0


def test_a_faster_memory_and_more_cores_never_take_longer() -> None:
    for rates in ([{"ram_bytes_s": each} for each in (2e10, 4e10, 8e10)], [{"cores": each} for each in (2, 4, 8, 32)]):
        found = [chosen(rates=each).prediction.total_s for each in rates]
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(found))


def test_what_attention_takes_is_its_bytes_where_cores_are_many_and_its_numbers_where_they_are_few() -> None:
    rates = replace(question(NAME, CARD, 24).costs.rates, ram_bytes_s=4e10, link_bytes_s=1e10, cores=1000)
    spec = KVSpec(KVGroup((0, 1, 2), 4, 128, None), "int8")
    nbytes = 3 * 200 * 5000 * spec.record_nbytes / spec.block
    assert CPUAttention((spec,), rates).seconds(200, 5000, 0) == pytest.approx(nbytes / 1.5e10, rel=0.01)
    one = CPUAttention((spec,), replace(rates, cores=1)).seconds(200, 5000, 0)
    assert one == pytest.approx(3 * 200 * 5000 * 4 * 256 / 4e9, rel=0.03)
    window = KVSpec(KVGroup((0, 1, 2), 4, 128, 50), "int8")
    assert CPUAttention((window,), rates).seconds(200, 5000, 0) < 0.05 * one
    assert CPUAttention((spec,), rates).seconds(0, 5000, 9) == 0


def test_a_saved_plan_keeps_it_unless_it_is_turned_off(tmp_path: Path) -> None:
    result = chosen()
    (tmp_path / "plan.json").write_text(json.dumps(document(NAME, result, [], [], 0)))
    assert load_plan(tmp_path / "plan.json", result.request).host_kv == result.plan.host_kv
    off = load_plan(tmp_path / "plan.json", result.request.with_settings(cpu_attention="off"))
    assert off.host_kv is not None
    assert off.host_kv.rows_nbytes == 0
    assert off.free_nbytes == result.plan.free_nbytes + 2 * rows_nbytes(result)


def test_a_plan_says_what_the_other_choice_would_give() -> None:
    found = document(NAME, chosen(), [], [], 0)
    assert found["without_cpu_attention"] == chosen(cpu_attention="off").prediction.generated_tok_s
    assert document(NAME, chosen(cpu_attention="off"), [], [], 0)["without_cpu_attention"] is None
