"""What a plan says will compute is what loading chooses, for structures and settings that differ in it."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moedge.quant.native import library
from moedge.runtime.loading import engine_loader
from moedge.runtime.loading.engine_loader import load_engine, make_compute
from moedge.runtime.plan.kernels import FUSED_DECODER, FUSED_LAYERS, SEAMS, Kernels, planned_kernels
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source

SIZES = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 64}
INT4 = Settings(dtype="bf16", quant="int4", kv="bf16")


@pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not usable here")
@pytest.mark.parametrize(
    ("family", "changed", "wanted"),
    [
        ("qwen3_moe", {}, Kernels(FUSED_DECODER, "native", "tiles")),
        ("qwen3_moe", {"compute": "int8"}, Kernels(FUSED_DECODER, "native", "tiles with int8 rows")),
        ("qwen3_moe", {"kv": "int8"}, Kernels(FUSED_LAYERS, "native", "tiles")),
        ("qwen3_moe", {"deterministic": True}, Kernels(SEAMS, "torch", "tiles")),
        ("qwen3_moe", {"quant": "none", "attention": "torch"}, Kernels(SEAMS, "torch", "torch")),
        ("llama", {}, Kernels(FUSED_DECODER, "native", "tiles")),
    ],
)
def test_a_plan_names_what_loading_chooses(
    family: str, changed: dict[str, object], wanted: Kernels, checkpoint: Callable[..., Path]
) -> None:
    with open_source(str(checkpoint(family, **SIZES))) as source:
        settings = replace(replace(INT4, compute="float"), **changed)  # type: ignore[arg-type]
        plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(8, 64))
        assert planned_kernels(plan, source.shape) == wanted
        with closing(load_engine(source, plan)) as loaded:
            assert loaded.kernels(plan) == wanted


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_products_are_shared_by_all_threads(
    family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts and of dense layers, whose rates (`runtime/calibration/pass_rates.py`) are those of all threads."""
    monkeypatch.setattr(engine_loader, "num_workers", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with open_source(str(checkpoint(family, **SIZES))) as source:
        plan = make_plan(source.shape, replace(INT4, compute="float"), MemoryBudget(4 << 30), Workload(8, 64))
        assert make_compute(source.shape, plan, torch.device("cpu")).num_workers == 3
