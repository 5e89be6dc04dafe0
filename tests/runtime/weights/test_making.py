"""A store within a budget (`runtime/loading/prepare.py`, `runtime/weights/preparation.py`): fewer experts at a time,
the same bytes; too little is refused with what would do.
"""

import gc
import re
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.offload.errors import BadStore
from moedge.offload.store.manifest import MANIFEST, read_manifest
from moedge.offload.stream.stream import ShardKey
from moedge.quant.formats.format import NF4PACK, ROWS, Layout
from moedge.quant.matmul.matmul import kernel_order
from moedge.quant.tensor import PackedTensor
from moedge.runtime.loading import prepare as module
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import prepare, prepare_linked, store_path
from moedge.runtime.model.definition import LayerAssembly
from moedge.runtime.model.loading import CheckpointLoader
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.errors import DoesNotFit
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.shards import ShardLayout, model_shards
from moedge.runtime.source.model_source import ModelSource, open_source
from moedge.runtime.weights.preparation import WINDOW_NBYTES, MemorySink, Preparation, window_nbytes


def smallest(source: ModelSource) -> int:
    """The budget that a refusal names, in bytes."""
    with pytest.raises(DoesNotFit) as refused:
        prepare(source, Path("never-written"), "nf4", "fp32", Budgets(ram="1MiB").on_cpu())
    found = re.search(r"--ram (\d+)MiB", str(refused.value))
    assert found
    return int(found[1]) << 20


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many experts each call of the loader converts."""
    sizes: list[int] = []
    load = CheckpointLoader.load_experts

    def counted(
        self: CheckpointLoader, index: int, experts: object, up_name: str, window: range, kept: dict[str, Layout]
    ) -> object:
        sizes.append(len(window))
        return load(self, index, experts, up_name, window, kept)

    monkeypatch.setattr(CheckpointLoader, "load_experts", counted)
    return sizes


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_small_budget_packs_the_same_bytes_an_expert_at_a_time(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path, windows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_source(str(checkpoint(family))) as source:
        prepare(source, tmp_path / "ample", "nf4", "fp32", Budgets().on_cpu())
        together = list(windows)
        windows.clear()
        # Tiny experts all fit into a MiB: hold the budget to what one of them takes.
        one = max(layer.experts.numel * 4 for layer in source.shape.layers if layer.experts)
        monkeypatch.setattr("moedge.runtime.loading.prepare.window_nbytes", lambda *_: one)
        prepare(source, tmp_path / "tight", "nf4", "fp32", Budgets().on_cpu())
    assert max(together) == 8
    assert windows == [1] * 8 * len(together)
    files = sorted(path.name for path in (tmp_path / "ample").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "tight").iterdir())
    assert all((tmp_path / "ample" / name).read_bytes() == (tmp_path / "tight" / name).read_bytes() for name in files)


def test_too_little_memory_is_refused_and_what_is_named_is_enough(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        enough = smallest(source)
        with pytest.raises(DoesNotFit):
            prepare(source, tmp_path / "store", "nf4", "fp32", Budgets(ram=f"{(enough >> 20) - 2}MiB").on_cpu())
        assert not (tmp_path / "store").exists()
        prepare(source, tmp_path / "store", "nf4", "fp32", Budgets(ram=f"{enough >> 20}MiB").on_cpu())
        assert (tmp_path / "store" / "manifest.json").is_file()


def test_the_window_grows_with_the_budget_from_one_expert_to_its_bound(checkpoint: Callable[[str], Path]) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        layers = source.shape.layers
        big = replace(source.shape, layers=tuple(layers) * 4)
        shards = model_shards(big, "nf4", "fp32")
        budgets = range(smallest(source), smallest(source) + (1 << 29), 32 << 20)
        found = [window_nbytes(big, shards, "fp32", budget) for budget in budgets]
    one = max(layer.experts.numel * 4 for layer in layers if layer.experts)
    assert found[0] >= one
    assert found == sorted(found)
    assert found[-1] == WINDOW_NBYTES


def test_the_order_of_codes_is_in_the_manifest_and_another_order_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        prepare(source, tmp_path / "store", "int4", "fp32", Budgets().on_cpu())
    manifest = read_manifest(tmp_path / "store" / MANIFEST)
    assert manifest.recipe["layout"] == ROWS
    with open_source(str(tmp_path / "store")) as source:
        assert source.recipe["quant"] == "int4"
    assert source.recipe["layout"] == ROWS
    # Stores of an earlier int4 had other planes.
    for change in ({"layout": NF4PACK}, {"quant": "int3"}, {"layout": None}, {"planes": None}):
        changed = replace(manifest, recipe={**manifest.recipe, **change})
        (tmp_path / "store" / MANIFEST).write_bytes(changed.encode())
        with pytest.raises(BadStore, match="wanted; prepare the model again"), open_source(str(tmp_path / "store")):
            pass


def test_stores_for_a_cpu_and_for_a_gpu_hold_the_same_numbers(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """In the order that the kernels of each read; a store in either order is loaded by what is in its manifest."""
    found: dict[str, list[torch.Tensor]] = {}
    job = Workload(1, 8)
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        plan = make_plan(source.shape, Settings(quant="nf4", dtype="bf16"), MemoryBudget(4 << 30), job)
        paths = [store_path(source, "nf4", "bf16", tmp_path, kind) for kind in ("cpu", "cuda")]
        orders = [kernel_order("nf4", torch.bfloat16, kind) for kind in ("cpu", "cuda")]
        assert (paths[0] == paths[1]) == (orders[0] == orders[1])
        for kind, path, order in zip(("cpu", "cuda"), paths, orders, strict=True):
            prepare(source, path, "nf4", "bf16", Budgets().on_cpu(), device_type=kind)
            assert read_manifest(path / MANIFEST).recipe["layout"] == order
            with open_source(str(path)) as stored:
                assert dict(stored.recipe) == {"quant": "nf4", "dtype": "bf16", "layout": order}
            with closing(load_engine(source, plan, path)) as loaded:
                shard, layout = loaded.streamed.memory.shard(ShardKey(0, 1)), loaded.shards.layers[0].expert
                assert layout is not None
                matrices = [(each.layout, shard[each.offset : each.end]) for each in layout.matrices]
                assert {each.order for each, _ in matrices} <= {"rows", order}
                found[kind] = [PackedTensor.bind(*each).dequantize() for each in matrices]
    assert all(torch.equal(mine, other) for mine, other in zip(found["cpu"], found["cuda"], strict=True))


def test_in_memory_the_head_is_packed_before_the_layers_and_is_there_once(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end, when the layers fill the budget, there are no bytes for the largest matrix twice."""
    done: list[str] = []
    pack_head, install = Preparation._pack_head, LayerAssembly.install

    def packed(self: Preparation, layout: ShardLayout, sink: MemorySink) -> None:
        pack_head(self, layout, sink)
        done.append(f"head {self._model.get_output_embeddings().weight.device}")

    def installed(self: LayerAssembly) -> None:
        install(self)
        done.append("layer")

    monkeypatch.setattr(Preparation, "_pack_head", packed)
    monkeypatch.setattr(LayerAssembly, "install", installed)
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        plan = make_plan(source.shape, Settings(quant="int8"), MemoryBudget(4 << 30), Workload(2, 16))
        load_engine(source, plan).close()
        assert done == ["head meta", *["layer"] * len(source.shape.layers)]


@pytest.mark.parametrize("linked", [False, True])
def test_nothing_of_preparing_stays_for_the_job_that_follows(
    linked: bool, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a cycle, which the collector frees; then the heap is trimmed, before anything else is loaded."""
    models: list[weakref.ref[object]] = []
    left: list[int] = []
    define = module.define

    def defined(*arguments: Any) -> Any:
        model = define(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(module, "define", defined)
    monkeypatch.setattr(module, "trim", lambda: left.append(sum(model() is not None for model in models)))
    monkeypatch.setattr(module, "_keep_key_offsets", lambda *_: left.append(-1))
    gc.disable()
    try:
        with open_source(str(checkpoint("qwen3_moe"))) as source:
            if linked:
                assert (
                    prepare_linked(source, tmp_path / "store", "none", source.shape.dtype, Budgets().on_cpu())
                    is not None
                )
            else:
                prepare(source, tmp_path / "store", "int8", "fp32", Budgets().on_cpu())
    finally:
        gc.enable()
    assert len(models) == 1
    assert left == [0, -1]
