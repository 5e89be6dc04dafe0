"""What planning costs (`runtime/plan/planner.py`) may only go down: functions of Python that are called for a plan and
for other budgets, and plans that are made whole.

The figures are ceilings. A slower planner is more of either: `moedge plan` makes some twenty plans, and is the first
command that a person types.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

import moedge
from moedge.runtime.plan import planner
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, solve
from moedge.runtime.settings.settings import Settings
from moedge.runtime.shape.shards import model_shards
from support.known_shapes import known_shape
from support.plans_page import question

GIB = 1 << 30
ROOT = str(Path(moedge.__file__).parents[1])
# Calls for the first plan, with all that one with another budget shares; calls for that one; and whole plans of both.
CEILINGS = {"Qwen3-30B-A3B": (390_000, 104_000, 55), "gpt-oss-20b": (324_000, 137_000, 101)}


def request(name: str) -> PlanRequest:
    asked = question(
        name, "RTX 3060 12GB", 32, Settings(tokens_per_pass=256), Workload(1000, 768, 768, 512_000, 256_000)
    )
    return replace(asked, costs=CostModel(known_shape(name), asked.costs.rates))


def calls(function: Callable[[], object]) -> int:
    """Functions of the package that are called."""
    found = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        file = frame.f_code.co_filename
        # Where the environment is a folder of the checkout, not what looks for modules there.
        found += event == "call" and file.startswith(ROOT) and "site-packages" not in file

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Candidates of which a whole plan is made."""
    found: list[object] = []
    plan = planner._Search._plan
    monkeypatch.setattr(planner._Search, "_plan", lambda search, ranked: found.append(ranked) or plan(search, ranked))
    return found


@pytest.mark.sample("Qwen3-30B-A3B")
@pytest.mark.parametrize("name", CEILINGS)
def test_a_plan_costs_no_more_calls_and_whole_plans_than_were_counted(name: str, whole: list[object]) -> None:
    asked = request(name)
    model_shards.cache_clear()
    counted = calls(lambda: solve(asked)), calls(lambda: solve(asked.with_budget("device", 5 * GIB))), len(whole)
    for found, ceiling in zip(counted, CEILINGS[name], strict=True):
        assert 0.7 * ceiling < found <= ceiling, counted


def test_a_bound_that_forgets_the_disk_is_found(whole: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what was lost once, a bound that knew of no bytes on disk, makes many times as many whole plans."""
    least = CostModel.least_seconds
    monkeypatch.setattr(CostModel, "least_seconds", lambda *arguments: least(*arguments[:-1], 1 << 60))
    solve(request("Qwen3-30B-A3B"))
    assert len(whole) > 1.5 * CEILINGS["Qwen3-30B-A3B"][2]
