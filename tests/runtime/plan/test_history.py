"""What runs teach (`runtime/plan/plan_file.py`): kept whole or not at all, believed only undamaged, and the next
prediction is closer.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from moedge.runtime.plan import plan_file
from moedge.runtime.plan.plan_file import MOST_KEPT, PastRun, corrections, keep, last_runs

RUN = PastRun(
    "2026-11-21T10:00:00+00:00", "box", "a model", "shape", "nf4 bf16", "compute", 1.4, 10.0, 7.1, 1 << 30, 1 << 29
)
KINDS = ("nf4 bf16", "none bf16")


@pytest.mark.sample("12")
@pytest.mark.parametrize("most", [12, MOST_KEPT])
def test_runs_are_kept_newest_first_and_bounded(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_file, "MOST_KEPT", most)
    path = tmp_path / "state" / "runs.json"
    for index in range(most + 5):
        keep(replace(RUN, measured_tok_s=float(index)), path)
    runs = last_runs(most + 100, path)
    assert [run.measured_tok_s for run in runs] == [float(index) for index in range(most + 4, 4, -1)]
    assert len(last_runs(3, path)) == 3
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_cut_or_edited_counts_as_empty_and_a_failed_write_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.json"
    keep(RUN, path)
    whole = path.read_bytes()
    wrong = [whole[:length] for length in range(0, len(whole), 11)]
    wrong += [whole.replace(b"runs/3", b"runs/2"), whole.replace(b"1.4", b"NaN"), whole.replace(b"1.4", b"0"), b"[]"]
    wrong += [whole.replace(b'"box"', b"3"), whole.replace(b'"at"', b'"then"')]
    for content in wrong:
        path.write_bytes(content)
        assert last_runs(5, path) == []
    path.write_bytes(whole)

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        keep(RUN, path)
    assert json.loads(path.read_bytes()) == json.loads(whole)
    assert list(tmp_path.iterdir()) == [path]


def test_the_newest_run_of_a_model_corrects_it_in_every_weight_format() -> None:
    """Else the formats that never ran would look fast beside those that did."""
    ratios = [1.4, 1.5, 1.3, 9.0]
    runs = [replace(RUN, ratio=ratio, formats=kind) for ratio, kind in zip(ratios, 2 * list(KINDS), strict=True)]
    learned = [corrections(runs, "box", "shape", f"{quant} bf16") for quant in ("none", "int8", "int4", "nf4", "auto")]
    assert learned[0]["generating"] == 1.4
    assert all(each == learned[0] for each in learned)


def test_loading_learns_from_the_newest_run_that_loaded() -> None:
    runs = [replace(RUN, ratio=3.0, loading_ratio=0.0), replace(RUN, ratio=2.0, loading_ratio=1.5)]
    assert corrections(runs, "box", "shape", "nf4 bf16") == {"generating": 3.0, "loading": 1.5}


def test_runs_of_other_models_machines_and_arithmetic_do_not_count() -> None:
    runs = [replace(RUN, ratio=ratio) for ratio in (5.0, 6.0, 7.0)]
    assert corrections(runs, "box", "another", "nf4 bf16") == {}
    assert corrections(runs, "elsewhere", "shape", "nf4 bf16") == {}
    assert corrections(runs, "box", "shape", "nf4 bf16 device") == {}
    assert corrections(runs, "box", "shape", "nf4 fp32") == {}
