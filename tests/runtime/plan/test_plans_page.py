"""Plans for cards of data sheets (`runtime/plan/presets.py`): the page and the golden file are what the planner
(`runtime/plan/planner.py`) says today, and its laws hold.
"""

import json
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from moedge.offload.machine.hardware import Hardware
from moedge.runtime.jobs import job_plan
from moedge.runtime.jobs.job_plan import plan_request
from moedge.runtime.plan import planner
from moedge.runtime.plan.planner import WORTH_STREAMING, PlanResult, solve
from moedge.runtime.plan.presets import PRESETS
from moedge.runtime.settings.settings import Budgets, Settings
from moedge.runtime.source.model_source import read_headers
from moedge.what_if import by_budget
from support.plans_page import (
    CARDS,
    GIB,
    GOLDEN,
    HEAD,
    JOB,
    MODELS,
    PAGE,
    RAM,
    ROOT,
    SHOWN,
    choice,
    kept,
    other_settings,
    question,
    row,
)
from support.recorded_machine import config_only

KEPT: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
# Sums are rounded to four digits in the file. Weights that RAM holds are converted at load, those that stream from the
# checkpoint's own files are not: some seconds of hours.
ROUNDED = 1 + 5e-3


def test_the_page_and_the_file_are_about_all_models_and_cards() -> None:
    """`PYTHONPATH=tests python -m support.plans_page` writes both anew."""
    text = PAGE.read_text()
    assert text.startswith(HEAD)
    titles = [each.split("\n", 1)[0] for each in text.split("\n## ")[1:]]
    assert titles == [*MODELS, "Other settings"]
    assert list(MODELS) == list(KEPT)
    for plans in KEPT.values():
        assert list(plans) == [f"{card}, {ram} GiB" for card in CARDS for ram in RAM]


# What any card shows of a change to the planner; the laws below are held of all in the file.
@pytest.mark.sample("Qwen3-30B-A3B-RTX 4060 8GB")
@pytest.mark.parametrize(("name", "card"), list(product(MODELS, CARDS)))
def test_plans_are_current_and_keep_every_budget(name: str, card: str) -> None:
    for ram in RAM:
        found = choice(name, card, ram)
        assert kept(found) == KEPT[name][f"{card}, {ram} GiB"]
        if SHOWN.get(card) == ram:
            assert row(name, card, ram) in PAGE.read_text().split(f"## {name}\n")[1]
        if found is not None:
            budget = question(name, card, ram).budget
            assert budget.device is not None
            assert found.plan.used_nbytes <= budget.device.nbytes
            assert found.plan.budget.host_nbytes == ram * GIB


def _plans(name: str, card: str) -> list[dict[str, Any]]:
    """By RAM, those that fit."""
    return [plan for ram in RAM if (plan := KEPT[name][f"{card}, {ram} GiB"])]


@pytest.mark.parametrize("name", MODELS)
def test_more_ram_and_a_card_that_is_better_in_everything_are_never_slower(name: str) -> None:
    """In every weight format: what is gained may go into a format that loses less."""

    def figures(card: str) -> tuple[float, ...]:
        found = PRESETS[card]
        generation, lanes = found.pcie
        issued = found.processors * found.ghz
        return found.gib, found.bandwidth, found.tflops, issued, lanes << generation, float(found.capability)

    def not_slower(before: dict[str, Any], after: dict[str, Any]) -> None:
        for quant in before["seconds"].keys() & after["seconds"].keys():
            assert after["seconds"][quant] <= before["seconds"][quant] * ROUNDED, (quant, before, after)

    compared = 0
    for card, other in product(CARDS, CARDS):
        better = all(x <= y for x, y in zip(figures(card), figures(other), strict=True))
        if better and card != other:
            for before, after in zip(_plans(name, card), _plans(name, other)[-len(_plans(name, card)) :], strict=True):
                not_slower(before, after)
                compared += 1
    assert compared > 20
    for card in CARDS:
        plans = _plans(name, card)
        for before, after in pairwise(plans):
            not_slower(before, after)


def test_no_card_with_kernels_for_experts_computes_them_one_by_one() -> None:
    """int4's are not grouped on a device; before costs were counted, plans for cards of 8 GB took it."""
    for name, card in product(MODELS, CARDS):
        if float(PRESETS[card].capability) >= 8:
            assert all(plan["grouped"] for plan in _plans(name, card)), (name, card)


def test_weights_stream_only_where_that_gains_more_than_predictions_are_good_for() -> None:
    """Against the choices that always take the fastest plan, and always one that holds all weights."""

    def chosen(worth: float, gpu_mem: str, most: int | None) -> PlanResult:
        settings = Settings(quant="int4", kv="int4", max_sequences=most, host_kv="off")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "WORTH_STREAMING", worth)
            return solve(question("Qwen3-30B-A3B", "RTX 4090 24GB", 64, settings, gpu_mem=gpu_mem))

    seen = set()
    for gpu_mem, most in product(("20GiB", "22GiB", "auto"), (None, 64)):
        choice, fastest, held = (chosen(worth, gpu_mem, most) for worth in (planner.WORTH_STREAMING, 1, 1e9))
        gains = held.prediction.total_s > planner.WORTH_STREAMING * fastest.prediction.total_s
        assert choice == (fastest if gains else held)
        seen.add((fastest == held, gains))
    assert seen == {(False, True), (False, False), (True, False)}
    plan = KEPT["Qwen3-30B-A3B"]["RTX 4090 24GB, 64 GiB"]
    assert plan["held"] >= 0.95
    assert plan["tok_s"] >= 1500


def test_figures_of_other_settings_are_current() -> None:
    assert PAGE.read_text().endswith(other_settings())


def test_the_readme_has_the_plan_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for loading, which the processor and the disk decide."""
    monkeypatch.setattr(job_plan, "find_hardware", lambda _: Hardware("any", 8, 64 << 30, (), "nvme"))
    budgets, headers = Budgets(ram="24GiB"), read_headers(str(config_only(tmp_path)))
    found = solve(plan_request(headers, Settings(), budgets, None, JOB, gpu="RTX 4060 8GB"))
    plan, told, text = found.plan, found.prediction, (ROOT / "README.md").read_text()
    busy = {name: seconds / told.seconds for name, seconds in told.busy_s.items() if seconds}
    assert plan.host_kv is not None
    crossing = solve(plan_request(headers, Settings(cpu_attention="off"), budgets, None, JOB, gpu="RTX 4060 8GB"))
    rate = f"{crossing.prediction.generated_tok_s:.0f} tok/s"
    cohorts = f"{plan.host_kv.count} cohorts, the CPU attends to them, --cpu-attention off: {rate}"
    assert (
        f"{plan.kv_sequences} sequences at full length on the GPU, {plan.host_kv.sequences} in RAM ({cohorts})" in text
    )
    without = solve(plan_request(headers, Settings(host_kv="off"), budgets, None, JOB, gpu="RTX 4060 8GB")).prediction
    assert f"all on the GPU: {without.generated_tok_s:.0f} tok/s" in text
    assert f"plan: weights {plan.quant}, KV cache {plan.kv}, dtype {plan.dtype}; {plan.max_sequences} sequences" in text
    assert f"estimate: {told.generated_tok_s:.0f} tok/s generated" in text
    assert f"then {timedelta(seconds=int(told.seconds))}" in text
    others = sorted(busy.keys() - {told.bottleneck}, key=lambda name: -busy[name])
    shares = "; ".join([f"{busy[told.bottleneck]:.0%}", *(f"{name} {busy[name]:.0%}" for name in others)])
    assert f"bottleneck: {told.bottleneck} ({shares})" in text


# As few as a person would ask for, and as many as a 3060 has room for.
@pytest.mark.parametrize("settings", [Settings(quant="nf4"), Settings(quant="int8", max_sequences=4)])
def test_a_card_that_is_better_in_one_figure_is_never_slower(settings: Settings) -> None:
    """In one weight format. Multiprocessors follow from TFLOP/s in a description."""
    figures = {"gib": "12GiB", "bandwidth": "360GB/s", "tflops": "25TFLOP/s", "pcie": "pcie4x8"}
    better = {"gib": "13GiB", "bandwidth": "400GB/s", "tflops": "30TFLOP/s", "pcie": "pcie4x16"}

    def seconds(**changed: str) -> float:
        found = solve(question("Qwen3-30B-A3B", f"x: {', '.join((figures | changed).values())}", 64, settings))
        return found.prediction.total_s

    base = seconds()
    slower = {name for name, figure in better.items() if seconds(**{name: figure}) > base * (1 + 1e-9)}
    assert not slower
    assert seconds(**better) < base


# With passes that are given the search is short, and formats are chosen all the same.
@pytest.mark.sample("gpt-oss-20b-given passes")
@pytest.mark.parametrize(
    "passes", [{}, {"tokens_per_pass": 1024, "max_sequences": 32}], ids=["any passes", "given passes"]
)
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "gpt-oss-20b"])
def test_every_point_of_a_curve_is_what_that_budget_plans(name: str, passes: dict[str, int]) -> None:
    asked = question(name, "RTX 3060 12GB", 24, Settings(**passes))  # type: ignore[arg-type]
    points = {(point.varied, point.value): point for point in by_budget(asked, solve(asked))}
    assert ("device", 11 * GIB + GIB // 2) in points
    for gib in (5, 8):
        point = points["device", gib * GIB]
        own = solve(question(name, "RTX 3060 12GB", 24, asked.settings, gpu_mem=f"{gib}GiB"))
        assert (point.generated_tok_s, point.quant) == (own.prediction.generated_tok_s, own.plan.quant)
    assert max(value for varied, value in points if varied == "device") <= 12 * GIB


@pytest.mark.parametrize(
    ("name", "card", "settings"),
    [
        ("Qwen3-30B-A3B", "RTX 4060 8GB", Settings(quant="nf4", kv="int8")),
        ("Qwen3-30B-A3B", "RTX 4090 24GB", Settings(quant="nf4", kv="int8")),
        ("gpt-oss-20b", "RTX 3060 12GB", Settings(quant="none", kv="int4")),
    ],
)
def test_speed_in_a_format_grows_with_the_budget_of_a_card(name: str, card: str, settings: Settings) -> None:
    """From the smallest budgets on; a tenth of a GiB at a time near the card's own, where budgets gave less."""
    quarters = range(12, 4 * PRESETS[card].gib - 8, 1 + PRESETS[card].gib // 12)
    near = range(PRESETS[card].gib * 10 - 20, PRESETS[card].gib * 10 - 5, 3)
    before = 0.0
    for gib in [*(each / 4 for each in quarters), *(each / 10 for each in near)]:
        found = solve(question(name, card, 64, settings, gpu_mem=f"{int(gib * 1024)}MiB"))
        # Loading and generating together decide, and what streams must be worth it; cohorts in host memory cross the
        # link whole, filled or not.
        streams = bool(found.plan.placement.ring_nbytes) + (found.plan.host_kv is not None)
        rows_s = 10_000 / found.prediction.total_s / WORTH_STREAMING**streams
        assert rows_s >= before * (1 - (1e-9 if found.plan.host_kv is None else 5e-3)), gib
        before = rows_s
    assert before > 0.4
