"""Spoiled quantized checkpoints of every layout (`runtime/shape/quantization.py`, `runtime/model/dequantize.py`) are
refused in a sentence; harmless changes are read.
"""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.hostile.layouts import LAYOUTS, judged, spoiled, write_layout
from support.hostile.quantized import ACCEPT, MUTATIONS, REFUSE


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def write(layout: str) -> Path:
        if layout not in folders:
            folders[layout] = write_layout(layout, tmp_path_factory.mktemp("layout"))
        return folders[layout]

    return write


def verdicts(folder: Path, seeds: range, scratch: Path) -> tuple[list[tuple[object, ...]], Counter[str]]:
    wrong, counts = [], Counter[str]()
    for seed in seeds:
        if (case := spoiled(folder, seed)) is None:
            continue
        outcome, fault = judged(case, scratch)
        counts[case.verdict] += 1
        if fault:
            wrong.append((seed, case.kinds, fault, outcome.message))
    return wrong, counts


@pytest.mark.sample("ct int4 g64 asym", "bnb nf4")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_spoiled_layout_gets_its_verdict(layout: str, written: Callable[[str], Path], tmp_path: Path) -> None:
    wrong, counts = verdicts(written(layout), range(3 * len(MUTATIONS)), tmp_path / "case")
    assert not wrong
    assert counts[REFUSE] >= 15
    assert counts[ACCEPT] >= 1
