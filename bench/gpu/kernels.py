"""Part `kernels`: every kernel against float64 over all formats and sizes; on a GPU its time against its floor, too."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from report import Report

# Products in the interpreter, and in float32 on a GPU.
MOST_ERROR = 2e-6


def run_kernels(report: Report, fake: bool) -> None:
    bench = _load()
    for kernel in (*bench.paged_cases.KERNELS, bench.STORE, bench.GROUPED):
        report.step("kernels", f"{kernel}, float64", partial(_check, bench, kernel))
    if not fake:
        capability = torch.cuda.get_device_capability()
        report.step("kernels", "attention, time", partial(_time, bench, partial(bench.timed_attention, capability)))
        if capability >= (8, 0):
            report.step("kernels", "experts, time", partial(_time, bench, bench.timed_experts))


def _check(bench: ModuleType, kernel: str) -> dict[str, Any]:
    worst, cases = 0.0, 0
    with torch.inference_mode():
        for case, error in bench.checks(kernel):
            # Not-a-number is no error below the most: asked this way round.
            if not error < MOST_ERROR:
                raise AssertionError(f"relative L2 {error:.1e}, wanted {MOST_ERROR}: {case}")
            worst, cases = max(worst, error), cases + 1
    return {"cases": cases, "worst_relative_l2": worst}


def _time(bench: ModuleType, cases: Callable[[], Iterable[Any]]) -> dict[str, Any]:
    """Medians, and their floors by the rates of a device copy and of torch.mm in this very run."""
    bandwidth, rate, results = bench.copy_bandwidth(), bench.product_rate(), {}
    with torch.inference_mode():
        for case in cases():
            timed = bench.measure(case, bandwidth, rate)
            if not case.error < bench.MOST_ROUNDED:
                raise AssertionError(f"{case.name}: relative L2 {case.error:.1e}")
            results[case.name] = f"{timed.seconds * 1e6:.1f} us {timed.share:.0%} of {timed.bound}"
    return {"bytes_s": bandwidth, "flop_s": rate, "share_of_floor": results}


def _load() -> ModuleType:
    """bench/kernels.py, which has this file's name."""
    if "bench_kernels" not in sys.modules:
        spec = importlib.util.spec_from_file_location("bench_kernels", Path(__file__).parents[1] / "kernels.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["bench_kernels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["bench_kernels"])
    return sys.modules["bench_kernels"]
