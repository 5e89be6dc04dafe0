"""docs/plans.md is what the planner says today, and what it says is within the budgets."""

from pathlib import Path

import pytest

from moedge.runtime.plan.what_if import attempt
from support.known_shapes import CONFIGS
from support.plans_page import HOST, SIZES, page, question

PAGE = Path(__file__).parents[3] / "docs" / "plans.md"


def test_the_page_is_current() -> None:
    """`python tests/plans_page.py > docs/plans.md` makes it anew."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", CONFIGS)
def test_plans_keep_every_budget_and_a_larger_gpu_is_never_slower_in_a_format(name: str) -> None:
    seconds: dict[str, list[float]] = {}
    for size in SIZES:
        asked = question(name, size)
        found = attempt(asked)
        if found is None:
            continue
        assert asked.budget.device is not None
        assert found.plan.used_nbytes <= asked.budget.device.nbytes
        assert found.plan.budget.host_nbytes == HOST
        for quant, taken in found.seconds.items():
            seconds.setdefault(quant, []).append(taken)
    assert seconds, "no GPU of any size"
    for taken in seconds.values():
        assert taken == sorted(taken, reverse=True)
