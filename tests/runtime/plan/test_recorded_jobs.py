"""Passes that an H100 ran, against what counts and its data sheet say of them (`runtime/plan/cost_model.py`), with the
costs of that version.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moedge.offload.machine.profile import Overheads
from moedge.runtime.plan import cost_model
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, solve
from moedge.runtime.plan.presets import beside_layers_s
from moedge.runtime.plan.rates import rates_of
from moedge.runtime.settings.settings import Budgets, Settings
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.formula import shape_of_config
from support.plans_page import machine

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_jobs.json").read_text())
SAME = {"model_type": "qwen3_moe", "max_position_embeddings": 4096, "tie_word_embeddings": False}
WITHIN = 1.5
# Of a pass of `s`, whose weights cross the link in 4 ms: what counted launches, calls and Python do not explain.
# Nothing here makes up for it; only a profile on a GPU can say where it goes.
UNEXPLAINED_S = 0.08


def passed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[cost_model._PassCost, dict[str, Any]]:
    """The cost of the job's mean pass, with as many experts held as were, and what was recorded of it."""
    found = RECORDED["jobs"][name]
    (tmp_path / "config.json").write_text(json.dumps({**SAME, **found["config"], "intermediate_size": 512}))
    shape, profile = shape_of_config(ModelConfig.read(tmp_path)), machine(RECORDED["card"])
    costs = Overheads(**RECORDED["costs of that version, in seconds"])
    rates = replace(rates_of(profile, on_device=True), overheads=costs)
    # Greedy: one kernel for all rows, which is among those of every pass.
    monkeypatch.setattr(cost_model, "beside_layers_s", lambda rows: beside_layers_s(0))
    budget = Budgets(ram="91GiB", gpu_mem=found["gpu_mem"]).expected(
        profile.hardware, profile.kernel_lacks, elsewhere=True
    )
    job, model = Workload(1024, 238, 238, 1024 * 110, 1024 * 128), CostModel(shape, rates)
    settings = Settings(quant="none", kv="bf16", host_kv="off")
    plan = solve(PlanRequest(costs=model, workload=job, budget=budget, settings=settings)).plan
    each, more = divmod(found["held"], len(shape.layers))
    held = tuple(each + (index < more) for index in range(len(shape.layers)))
    plan = replace(plan, placement=replace(plan.placement, held_experts=held, held_dense=len(shape.layers)))
    decoding = min(found["sequences"], found["tokens"])
    load = cost_model._PassLoad(decoding, found["tokens"] - decoding, 110, 0, 174, 55)
    return model.pass_costs(plan).cost(load), found


@pytest.mark.parametrize("name", RECORDED["jobs"])
def test_bytes_over_the_link_are_those_that_were_counted(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cost, found = passed(name, monkeypatch, tmp_path)
    assert cost.link_nbytes == pytest.approx(found["link_nbytes"], rel=0.03)


def test_a_job_that_waited_for_the_link_is_predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cost, found = passed("q24", monkeypatch, tmp_path)
    pass_s = max(cost.link_s, cost.compute_s, cost.host_s)
    assert pass_s == cost.link_s
    assert 1 / WITHIN < found["pass_s"] / pass_s < WITHIN
    assert found["sequences"] / pass_s == pytest.approx(found["tok_s"], rel=0.1)
    assert found["tok_s"] / found["predicted_then"] > WITHIN


def test_of_a_job_that_waited_for_the_host_the_remainder_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not predicted within 1.5 times: counts explain a third of its pass. The bound of the remainder may only fall."""
    cost, found = passed("s", monkeypatch, tmp_path)
    pass_s = max(cost.link_s, cost.compute_s, cost.host_s)
    assert pass_s == cost.host_s
    assert 0.9 * UNEXPLAINED_S < found["pass_s"] - pass_s < UNEXPLAINED_S
