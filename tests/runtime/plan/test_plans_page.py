"""docs/plans.md is what the planner says today, and what it says is within the budgets."""

from pathlib import Path

import pytest

from moedge.runtime.settings.errors import DoesNotFit
from support.known_shapes import CONFIGS
from support.plans_page import HEAD, HOST, choices, question, section

PAGE = Path(__file__).parents[3] / "docs" / "plans.md"


def test_the_page_is_about_all_models() -> None:
    """`python -m support.plans_page > docs/plans.md`, with tests/ on the path, makes it anew."""
    head, *sections = PAGE.read_text().split("\n## ")
    assert head + "\n" == HEAD + "\n" or head == HEAD
    assert [each.split("\n", 1)[0] for each in sections] == list(CONFIGS)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_its_plans_are_current_keep_every_budget_and_a_larger_gpu_is_never_slower_in_a_format(name: str) -> None:
    assert section(name) in PAGE.read_text() + "\n"
    seconds: dict[str, list[float]] = {}
    for size, found in choices(name).items():
        if isinstance(found, DoesNotFit):
            continue
        budget = question(name, size).budget.device
        assert budget is not None
        assert found.plan.used_nbytes <= budget.nbytes
        assert found.plan.budget.host_nbytes == HOST
        for quant, taken in found.seconds.items():
            seconds.setdefault(quant, []).append(taken)
    assert seconds, "no GPU of any size"
    for taken in seconds.values():
        assert taken == sorted(taken, reverse=True)
