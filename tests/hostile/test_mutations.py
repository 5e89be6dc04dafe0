"""Spoiled checkpoints are refused (`runtime/shape/checkpoint_shape.py`), harmless ones are read.
tests/matrix/hostile.py does the same by the thousand.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from matrix.hostile import Result, report
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


def test_a_case_that_computes_for_long_is_named_and_one_that_waits_is_not(
    good_folders: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, waited = 0.0, 0.0
    monkeypatch.setattr(time, "process_time", lambda: computed)
    monkeypatch.setattr(time, "perf_counter", lambda: computed + waited)
    case = make_case(next(seed for seed in range(60) if make_case(seed, good_folders).verdict == ACCEPT), good_folders)

    def take(own: float, others: float) -> Result:
        def load(*_: object) -> None:
            nonlocal computed, waited
            computed, waited = computed + own, waited + others

        outcome = judge(case, tmp_path / "case", load)
        return Result("kind", outcome.refused, outcome.seconds, 1 << 20, outcome.wrong)

    assert report([take(0.5, 9.0)]) == []
    assert report([take(0.5, 0.0), take(2.5, 0.0)], first=7) == ["seed 8 (kind) took 2.50 s of the CPU and 1 MiB"]
