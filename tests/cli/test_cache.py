"""What the KV cache (`runtime/kv/cache.py`) does for a job, as its summary tells: prefixes computed once, rows that can
never fit.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

INSTRUCTION = "Answer in one short sentence and be friendly. " * 3


@pytest.fixture
def run(cli: Callable[..., int], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Exit code and summary of a job."""

    def run(model: Path, rows: Path, *options: object) -> tuple[int, dict[str, Any]]:
        summary = tmp_path / "summary.json"
        code = cli("batch", model, rows, "-o", tmp_path / "out.jsonl", "-q", "--summary", summary, *options)
        return code, json.loads(summary.read_text())

    return run


def test_rows_with_the_same_beginning_compute_it_once(
    checkpoint: Callable[[str], Path],
    run: Callable[..., tuple[int, dict[str, Any]]],
    rows_file: Callable[[Path, list[dict[str, Any]]], Path],
    tmp_path: Path,
) -> None:
    rows = [{"id": str(i), "prompt": f"{INSTRUCTION}Row {i}", "max_tokens": 4} for i in range(20)]
    rows.append({"id": "samples", "prompt": "Say something", "max_tokens": 4, "n": 5, "temperature": 1})
    code, summary = run(checkpoint("qwen3_moe"), rows_file(tmp_path / "in.jsonl", rows))
    kv, asked = summary["kv"], summary["tokens"]["prompt"]
    computed = summary["throughput"]["prompt_tok_s"] * summary["seconds"]["generate"]
    assert code == 0
    # A row's samples are asked with one prompt, as its `usage` says; the cache serves each of the others.
    assert kv["prefix_hit_tokens"] + round(computed) == asked + 4 * len("Say something")
    # 19 rows find all whole blocks of the instruction, four samples the whole prompt.
    found = 19 * (len(INSTRUCTION) // kv["block"] * kv["block"]) + 4 * len("Say something")
    assert found <= kv["prefix_hit_tokens"] <= found + 19 * kv["block"]
    parts = [kv["bytes"][name] for name in ("live", "waste", "cached", "idle")]
    assert abs(sum(parts) - kv["bytes"]["allocated"]) < 8
    assert kv["bytes"]["shared"] > kv["bytes"]["live"], "20 rows share three quarters of what they hold"


def test_a_row_that_alone_exceeds_the_cache_fails_and_is_counted_before_the_run(
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    rows_file: Callable[[Path, list[dict[str, Any]]], Path],
    rows_of: Callable[[Path], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The budget is a few blocks more than the short rows need: everything else is a constant here."""
    from moedge.runtime.jobs import lifecycle
    from moedge.runtime.plan.memory_ledger import MemoryLedger
    from moedge.runtime.plan.placement import Workload
    from moedge.runtime.plan.planner import budget_range
    from moedge.runtime.settings.settings import MemoryBudget

    rows = [{"id": f"{n}", "prompt": "x" * n, "max_tokens": 2} for n in (10, 20, 400, 60, 300)]
    plan_job = lifecycle.plan_job

    def tight(
        source: Any, settings: Any, budgets: Any, budget: MemoryBudget, job: Workload, *rest: Any, **others: Any
    ) -> Any:
        short = Workload(job.sequences, 70, job.shortest, job.prompt_tokens, job.generated_tokens)
        smallest = budget_range(source.shape, settings, short)[0]
        return plan_job(source, settings, budgets, replace(budget, host_nbytes=smallest), job)

    monkeypatch.setattr(lifecycle, "plan_job", tight)
    monkeypatch.setattr(lifecycle, "rehearse", lambda *arguments: None)
    # This process has held more than such a budget before.
    monkeypatch.setattr(MemoryLedger, "check", lambda self: None)
    out = tmp_path / "out.jsonl"
    options = ("-o", out, "--max-sequences", 1, "--quant", "none", "--disk-dir", tmp_path / "stores")
    code = cli("batch", checkpoint("llama"), rows_file(tmp_path / "in.jsonl", rows), *options)
    said = capsys.readouterr().err
    assert code in {3, 8}
    assert "2 rows may need more than the" in said
    assert [row["id"] for row in rows_of(out)] == ["10", "20", "60"]
    errors = rows_of(tmp_path / "out.errors.jsonl")
    assert [row["id"] for row in errors] == ["400", "300"]
    assert all("more than the KV cache holds" in json.dumps(row) for row in errors)


def test_little_of_the_cache_is_wasted_in_the_demos_job(
    run: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    demo = Path(__file__).parents[2] / "examples" / "tiny_moe"
    code, summary = run(demo / "model", demo / "prompts.jsonl", "--max-tokens", 120)
    assert code == 0
    assert summary["kv"]["waste"] < 0.05
