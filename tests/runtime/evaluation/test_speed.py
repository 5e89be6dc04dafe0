"""What `moedge bench` measures: every sequence whole, and each number beside what it is compared with."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moedge.cli.views.bench_view import print_bench
from moedge.runtime.evaluation.speed import Load, bench
from moedge.runtime.jobs import job_plan
from moedge.runtime.settings.errors import SettingError
from moedge.runtime.settings.settings import Budgets, Settings
from support.recorded_machine import RECORDED

BUDGETS = Budgets(ram="3GiB", gpu_mem="0")


def measure(model: Path, load: Load, **settings: Any) -> dict[str, Any]:
    return bench(str(model), Settings(**settings), BUDGETS, None, load)


@pytest.fixture
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3_moe")


def test_every_number_of_sequences_that_fits_is_measured(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """End tokens are ignored, nothing comes from the prefix cache, and the rest is named."""
    monkeypatch.setattr(job_plan, "load_machine", lambda hardware, path: replace(RECORDED, hardware=hardware))
    found = measure(model, Load((1, 3, 9), prompt_tokens=40, max_tokens=6), max_sequences=3)
    assert json.loads(json.dumps(found, allow_nan=False))["load"] == {
        "sequences": [1, 3, 9], "prompt_tokens": 40, "max_tokens": 6, "seed": 0,
    }  # fmt: skip
    assert [point["sequences"] for point in found["points"]] == [1, 3]
    for point in found["points"]:
        count = point["sequences"]
        assert point["tokens"] == {"prompt": 40 * count, "generated": 6 * count}
        assert point["failed"] == 0
        assert point["throughput"]["generated_tok_s"] == pytest.approx(6 * count / point["seconds"])
        assert 0 < point["latency"]["ttft_s"]["p50"] <= point["latency"]["total_s"]["p50"] <= point["seconds"]
        assert point["passes"]["count"] >= 6
        assert point["predicted"]["generated_tok_s"] > 0
        assert point["utilisation"]["compute"] > 0
        assert (point["utilisation"]["disk"], point["utilisation"]["link"]) == (0, None)
    print_bench(found)
    shown = capsys.readouterr().out
    assert (found["machine"]["measured"], found["machine"]["link_bytes_s"]) == (True, None)
    assert "not measured: 9 sequences do not fit together" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("T")] == ["TTFT", "TTFT", "TPOT", "TPOT"]


def test_a_machine_that_was_not_measured_has_no_utilisation(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_plan, "load_machine", lambda hardware, path: None)
    found = measure(model, Load((2,), prompt_tokens=5, max_tokens=2))
    assert set(found["points"][0]["utilisation"].values()) == {None}
    assert found["machine"]["disk_bytes_s"] is None
    print_bench(found)
    shown = capsys.readouterr().out
    assert "utilisation  " not in shown
    assert "machine not measured" in shown


def test_a_load_longer_than_the_context_is_refused(model: Path) -> None:
    with pytest.raises(SettingError, match="are 1,000,064, and the context has"):
        measure(model, Load((1,), prompt_tokens=10**6))
