"""`runtime/weights/importance.py`: second moments are those of transformers' own experts, the same bits in any memory,
and decide the bytes of a store's experts."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import silu

from moedge.offload.store.manifest import MANIFEST, read_manifest
from moedge.runtime.loading import prepare as module
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.prepare import calibrate, prepare, store_path
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import budget_range, make_plan
from moedge.runtime.settings.errors import SettingError
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.model_shape import ModelShape
from moedge.runtime.source.model_source import ModelSource, open_source
from moedge.runtime.text.tokenizer import Tokenizer
from moedge.runtime.weights.importance import FILE, PRIOR, WINDOW, Importance
from moedge.runtime.weights.key_offsets import TEXT

# More than a window, and not whole ones.
LONG = TEXT * 6


def sums_of(stock: Any, token_ids: list[int]) -> list[list[torch.Tensor]]:
    """Of each layer: tokens by expert [E, 1], sums of products of what reaches experts [D, D], and of squares of what
    reaches their second matrices [E, I], float64."""
    found: list[list[torch.Tensor]] = []
    for layer in stock.model.layers:
        experts = layer.mlp.experts
        (count, width, hidden), inner = experts.gate_up_proj.shape, experts.down_proj.shape[2]
        assert width == 2 * inner
        sizes = (count, 1), (hidden, hidden), (count, inner)
        totals = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        found.append(totals)

        def add(module: Any, args: tuple[torch.Tensor, ...], totals: list[torch.Tensor] = totals) -> None:
            rows, chosen = args[0].flatten(0, -2), args[1]
            totals[1] += rows.double().T @ rows.double()
            for expert in range(len(totals[0])):
                mine = rows[(chosen == expert).any(-1)]
                gate, up = (mine @ module.gate_up_proj[expert].T).chunk(2, -1)
                totals[0][expert] += len(mine)
                totals[2][expert] += (silu(gate) * up).double().square().sum(0)

        experts.register_forward_pre_hook(add)
    with torch.no_grad():
        for begin in range(0, len(token_ids), WINDOW):
            stock(torch.tensor([token_ids[begin : begin + WINDOW]]))
    return found


def tokens(source: ModelSource, text: str) -> list[int]:
    with Tokenizer.load(source.folder) as tokenizer:
        return tokenizer.encode(text)


def test_moments_are_those_of_transformers_experts(
    checkpoint: Callable[[str], Path], stock: Callable[[Path], Any], tmp_path: Path
) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        found = calibrate(source, LONG, "fp32", Budgets(disk_dir=tmp_path))
        wanted = sums_of(stock(checkpoint("qwen3_moe")), token_ids := tokens(source, LONG))
    assert len(token_ids) % WINDOW > 0 < len(token_ids) // WINDOW
    assert list(found.layers) == list(range(len(wanted)))
    for layer, (counts, products, squares) in enumerate(wanted):
        moments, down = (each.double() for each in found.layers[layer])
        least = float(moments.diagonal().mean()) * 1e-4
        torch.testing.assert_close(moments, products / len(token_ids), rtol=1e-3, atol=least)
        mean = (squares + PRIOR * squares.sum(0) / counts.sum()) / (counts + PRIOR)
        torch.testing.assert_close(down, mean, rtol=1e-3, atol=float(mean.mean()) * 2e-6)


def test_experts_that_no_token_reaches_have_the_mean_of_their_layer(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """One token reaches two experts of eight."""
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        found = calibrate(source, "a", "fp32", Budgets(disk_dir=tmp_path))
        assert len(tokens(source, "a")) == 1
    for _, down in found.layers.values():
        assert len(torch.unique(down, dim=0)) == 3
        _, counts = torch.unique(down, dim=0, return_counts=True)
        assert sorted(counts.tolist()) == [1, 1, 6]


def test_bits_are_the_same_where_weights_stream(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source:
        held = calibrate(source, TEXT, "bf16", Budgets(disk_dir=tmp_path))

        def smallest(shape: ModelShape, settings: Settings, budget: MemoryBudget, workload: Workload) -> Plan:
            least, _ = budget_range(shape, settings, workload)
            plans.append(make_plan(shape, settings, MemoryBudget(least), workload))
            return plans[-1]

        plans: list[Any] = []
        monkeypatch.setattr(module, "make_plan", smallest)
        again = calibrate(source, TEXT, "bf16", Budgets(disk_dir=tmp_path))
    assert all(plan.streams for plan in plans)
    assert plans
    assert all(
        torch.equal(a, b) for layer in held.layers for a, b in zip(held.layers[layer], again.layers[layer], strict=True)
    )


@pytest.mark.parametrize("quant", ["int8+int3", "int8+vq2"])
def test_a_store_keeps_what_it_was_calibrated_by(quant: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def store_of(source: ModelSource, folder: Path, importance: Importance | None) -> Path:
        prepare(source, folder, quant, "bf16", Budgets().on_cpu(), importance=importance)
        return folder

    with open_source(
        str(checkpoint("qwen3_moe", hidden_size=192, moe_intermediate_size=96, num_attention_heads=6))
    ) as source:
        importance = calibrate(source, TEXT, "bf16", Budgets(disk_dir=tmp_path))
        if quant == "int8+vq2":
            with pytest.raises(SettingError, match=r"--experts vq2 .*--calibrate FILE`"):
                store_of(source, tmp_path / "vq2", None)
            plain = None
        else:
            plain = store_of(source, tmp_path / "plain", None)
        calibrated = store_of(source, tmp_path / "calibrated", importance)
        again = store_of(source, tmp_path / "again", importance)
        names = (
            store_path(source, quant, "bf16", tmp_path),
            store_path(source, quant, "bf16", tmp_path, calibration=importance.digest),
        )
    assert names[0] != names[1], "neither is taken for the other"
    first, second, *others = (
        (each / "layer-0000.safetensors").read_bytes() for each in (calibrated, again, plain) if each is not None
    )
    assert first == second
    assert all(other != first and len(other) == len(first) for other in others)
    assert read_manifest(calibrated / MANIFEST).recipe["calibration"] == importance.digest
    assert plain is None or "calibration" not in read_manifest(plain / MANIFEST).recipe
    with safe_open(calibrated / FILE, "pt") as kept:
        assert kept.metadata()["text"] == importance.digest
        moments, down = importance.layers[0]
        assert torch.equal(kept.get_tensor("layers.0.up"), moments.diagonal())
        assert torch.equal(kept.get_tensor("layers.0.down"), down)
    with open_source(str(calibrated)) as source:
        settings = source.settle(Settings(quant=quant))
        plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(1, 32))
        with closing(load_engine(source, plan, calibrated)):
            pass


def test_a_text_without_tokens_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source, pytest.raises(SettingError, match="has no tokens"):
        calibrate(source, "", "fp32", Budgets(disk_dir=tmp_path))
