"""Plans that are made once, for tests that look at nothing else."""

import pytest

from moedge import plan_report


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a report of a plan has beside it, curves and suggestions, takes dozens of plans."""
    for name in ("by_budget", "by_sequences", "suggestions"):
        monkeypatch.setattr(plan_report, name, lambda *_: [])
