"""Part `budgets`: 4, 8, 12 and 24 GiB of a device held, as the driver counts it; and sequences by KV format."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.gpu.random_model import CONFIGS, random_source
from bench.gpu.report import Report
from bench.gpu.throughput import KV, PROMPT, measure_small, memory_of
from bench.gpu.throughput import measure as measure_run
from moedge.offload.budget import GIB
from moedge.offload.machine.hardware import find_gpus
from moedge.quant.kernels.gpu import Gpu
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.errors import DoesNotFit
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings

BUDGETS = (4, 8, 12, 24)
# What CUDA and its libraries take, for plans that nothing is measured for.
CONTEXT_NBYTES = 768 << 20
OUTPUT = 256


def run_budgets(report: Report, fake: bool) -> None:
    for name in CONFIGS:
        report.step("budgets", f"{name}, sequences by KV format", partial(_sequences, name))
    for share in (0.0, 0.3, 0.6, 1.0) if fake else ():
        report.step("budgets", f"small, {share:.0%} of the way to all", partial(measure_small, "qwen3", share))
    for gib in () if fake else BUDGETS:
        report.step("budgets", f"qwen3 in {gib} GiB", partial(_hold, gib))


def _hold(gib: int) -> dict[str, Any]:
    """A short run with few sequences; raises where the driver has seen more than the budget."""
    if find_gpus()[0].nbytes < gib * GIB:
        return {"skipped": "this GPU has less"}
    with random_source("qwen3") as source:
        settings = Settings(dtype="bf16", quant="nf4", kv="int8", tokens_per_pass=512, max_sequences=8)
        try:
            return measure_run(source, memory_of(f"{gib}GiB"), settings, PROMPT)
        except DoesNotFit as refused:
            return {"refused": str(refused)}


def _sequences(name: str) -> dict[str, Any]:
    """How many sequences the planner keeps alive in a device budget of 8 and 12 GiB, bf16 to int4."""
    job = Workload(100_000, PROMPT + OUTPUT)
    results: dict[str, float] = {}
    with random_source(name) as source:
        for gib in (8, 12):
            granted = DeviceBudget(gib * GIB, CONTEXT_NBYTES, 1 << 30, Gpu((8, 6), 28))
            for kv in KV:
                settings = Settings(dtype="bf16", quant="nf4", kv=kv, tokens_per_pass=4096, max_sequences=4096)
                results[f"{gib} GiB {kv}"] = make_plan(
                    source.shape, settings, MemoryBudget(1 << 40, granted), job
                ).kv_sequences
            results[f"{gib} GiB int4 over bf16"] = round(results[f"{gib} GiB int4"] / results[f"{gib} GiB bf16"], 2)
    return {"sequences": results, "tokens": PROMPT + OUTPUT}
