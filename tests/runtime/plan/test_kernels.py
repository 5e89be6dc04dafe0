"""What a plan says will compute is what loading chooses, for structures and settings that differ in it."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moedge.quant.matmul.row_layouts import reads_floats
from moedge.quant.native import library
from moedge.runtime.loading import engine_loader
from moedge.runtime.loading.engine_loader import load_engine, make_compute
from moedge.runtime.plan.candidate import fused_nbytes
from moedge.runtime.plan.kernels import FUSED_DECODER, FUSED_LAYERS, SEAMS, Kernels, planned_kernels
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source
from support.known_shapes import published_shape

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
        ("qwen3_moe", {"quant": "none"}, Kernels(FUSED_DECODER, "native", "floats by rows")),
        ("qwen3_moe", {"quant": "none", "attention": "torch"}, Kernels(FUSED_LAYERS, "torch", "floats by rows")),
        ("llama", {}, Kernels(FUSED_DECODER, "native", "tiles")),
    ],
)
def test_a_plan_names_what_loading_chooses(
    family: str, changed: dict[str, object], wanted: Kernels, checkpoint: Callable[..., Path]
) -> None:
    if changed.get("quant") == "none" and not reads_floats():
        wanted = Kernels(SEAMS, wanted.attention, "torch")
    with open_source(str(checkpoint(family, **SIZES))) as source:
        settings = replace(replace(INT4, compute="float"), **changed)  # type: ignore[arg-type]
        plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(8, 64))
        assert planned_kernels(plan, source.shape) == wanted
        with closing(load_engine(source, plan)) as loaded:
            assert loaded.kernels(plan) == wanted


@pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not usable here")
@pytest.mark.parametrize(("ram", "wanted"), [(5, FUSED_DECODER), (9, FUSED_DECODER), (24, FUSED_DECODER)])
def test_layers_whose_experts_stream_are_fused_within_the_ceiling(ram: int, wanted: str) -> None:
    """Their buffers, for whole passes with prompts, are paid for by experts that are held: a few of 6,144."""
    shape, settings = published_shape("Qwen3-30B-A3B"), replace(INT4, compute="float", max_sequences=48)
    plan = make_plan(shape, settings, MemoryBudget(ram << 30), Workload(1000, 512))
    assert plan.streams == (ram < 24)
    assert planned_kernels(plan, shape).executor == wanted
    assert plan.used_nbytes <= ram << 30
    if plan.streams:
        assert plan.fused_nbytes == fused_nbytes(shape, plan.tokens_per_pass, experts_stream=True) > 0


def test_dense_layers_that_stream_keep_the_seams() -> None:
    shape, settings = published_shape("Qwen3-30B-A3B"), replace(INT4, max_sequences=1, tokens_per_pass=16)
    plan = make_plan(shape, settings, MemoryBudget(1000 << 20), Workload(10, 64))
    assert plan.placement.held_dense < len(shape.layers)
    assert (plan.fused_nbytes, planned_kernels(plan, shape).executor) == (0, SEAMS)


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
