"""Spoiled checkpoints are refused, harmless ones are read. tests/matrix/hostile.py does the same by the thousand."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from moedge.runtime.shape import checkpoint_shape as shape_folder
from support.hostile.cases import judge, make_case
from support.hostile.load import load_weights
from support.hostile.mutations import ACCEPT, MUTATIONS, REFUSE

NUM_CASES = 300


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.slow
def test_every_spoiled_checkpoint_gets_its_verdict(good_folders: Sequence[Path], tmp_path: Path) -> None:
    assert len(MUTATIONS) < NUM_CASES
    wrong, verdicts = [], Counter[str]()
    for seed in range(NUM_CASES):
        case = make_case(seed, good_folders)
        outcome = judge(case, tmp_path / "case", load_weights)
        verdicts[case.verdict] += 1
        if outcome.wrong:
            wrong.append((seed, case.kinds, outcome.wrong, outcome.message))
    assert not wrong
    assert min(verdicts[REFUSE], verdicts[ACCEPT]) > 20


def test_without_the_comparison_with_config_the_harness_would_notice(
    good_folders: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_folder, "check_tensors", lambda *_: None)
    outcomes = [judge(make_case(seed, good_folders), tmp_path / "case", lambda *_: None) for seed in range(60)]
    assert sum(outcome.wrong is not None for outcome in outcomes) > 5
