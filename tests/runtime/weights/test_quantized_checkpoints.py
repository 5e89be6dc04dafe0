"""A quantized checkpoint of every layout (`runtime/model/dequantize.py`) loads, streams at the smallest budget and
computes what its weights mean.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.offload.errors import BadCheckpoint
from moedge.offload.store.store import Store
from moedge.quant.tensor import pack
from moedge.runtime.loading.prepare import precision, prepare
from moedge.runtime.model.dequantize import dequantize
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.planner import PlanRequest, SearchSpace
from moedge.runtime.settings.errors import SettingError
from moedge.runtime.settings.settings import Budgets, MemoryBudget
from moedge.runtime.shape.checkpoint_shape import read_tensors
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.shards import BESIDE_KEPT, default_format, offered_formats
from moedge.runtime.source.model_source import open_source
from support.quantized_checkpoints import FORMATS, Written, compressed, ct_config, gptq, words, write_quantized
from support.streamed_logits import JOB, SETTINGS, stock_logits, streamed_logits
from support.tiny_families import save_tiny

pytestmark = pytest.mark.numerics

# Float32 sums in another order.
TOLERANCE = 1e-5


@pytest.mark.sample("ct int4 g64 asym", "mxfp4")
@pytest.mark.parametrize("form", [*FORMATS, "mxfp4"])
def test_logits_are_those_of_the_dequantized_weights(
    form: str, tmp_path: Path, stock: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, wide = tmp_path / "quantized", tmp_path / "wide"
    write_quantized(form, quantized, wide, "gpt_oss" if form == "mxfp4" else "qwen3_moe")
    wanted = stock_logits(stock(wide))
    found = streamed_logits(quantized, tmp_path / "store", SETTINGS, monkeypatch)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.mark.sample("2-none")
@pytest.mark.parametrize(("bits", "quant"), [(2, "none"), (4, "none"), (4, "kept"), (8, "none")])
def test_zero_points_of_0_borrow_from_their_neighbours(
    bits: int, quant: str, tmp_path: Path, stock: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored as 15 in GPTQ's first layout, and the neighbour as one less: whole words are one less."""
    config = {**FORMATS["gptq v1"][1], "bits": bits}
    own = (lambda weight: gptq(weight, bits, least_zero=0), config)
    monkeypatch.setitem(FORMATS, "gptq v1", own)
    write_quantized("gptq v1", tmp_path / "quantized", tmp_path / "wide")
    stored = load_file(tmp_path / "quantized" / "model.safetensors")["model.layers.0.self_attn.q_proj.qzeros"]
    assert (stored.view(torch.uint8) >> (8 - bits) == (1 << bits) - 1).any()
    wanted = stock_logits(stock(tmp_path / "wide"))
    found = streamed_logits(tmp_path / "quantized", tmp_path / "store", replace(SETTINGS, quant=quant), monkeypatch)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("form", ["awq", "ct int4 g32 bf16", "gptq v1"])
def test_groups_that_do_not_divide_a_row_are_refused(form: str, tmp_path: Path) -> None:
    """Rows of 128 have four groups of 32, and as many of 33: columns would get their neighbours' scales."""
    folder = tmp_path / "quantized"
    write_quantized(form, folder, tmp_path / "wide")
    content = (folder / "config.json").read_text()
    (folder / "config.json").write_text(content.replace('"group_size": 32', '"group_size": 33'))
    if form == "gptq v1":
        # With g_idx it does not matter what the config says of groups.
        with open_source(str(folder)) as source:
            assert source.shape.num_experts
        tensors = load_file(folder / "model.safetensors")
        save_file({n: t for n, t in tensors.items() if not n.endswith("g_idx")}, folder / "model.safetensors")
    with (
        pytest.raises(BadCheckpoint, match=r"rows of 128, and config\.json says groups of 33"),
        open_source(str(folder)),
    ):
        pass


@pytest.mark.sample(1)
@pytest.mark.parametrize("scales", [None, torch.bfloat16])
def test_compressed_tensors_in_the_order_of_activations_are_read(
    scales: torch.dtype | None, tmp_path: Path, stock: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are packed again where they are not read as floats, with scales that a format has, too."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}

    def ordered(weight: torch.Tensor) -> Written:
        """Groups are of columns that lie apart, as `weight_g_idx` says; codes stay where their columns are."""
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.numel()))
        tensors, wide = compressed(weight[:, order].contiguous(), "pack-quantized", scales, **scheme)
        packed = tensors[".weight_packed"]
        codes = torch.stack([packed >> (4 * index) & 15 for index in range(8)], 2).flatten(1)
        back = order.argsort()
        return {
            **tensors,
            ".weight_packed": words(codes[:, back], 4, 1),
            ".weight_g_idx": (back // 32).to(torch.int32),
        }, wide[:, back]

    form = "ct act order"
    monkeypatch.setitem(FORMATS, form, (ordered, ct_config("pack-quantized", actorder="group", **scheme)))
    write_quantized(form, tmp_path / "quantized", tmp_path / "wide")
    wanted = stock_logits(stock(tmp_path / "wide"))
    found = streamed_logits(tmp_path / "quantized", tmp_path / "store", SETTINGS, monkeypatch)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    with open_source(str(tmp_path / "quantized")) as source:
        assert offered_formats(source.shape) == ("int8", "int4", "nf4")
        assert prepare(source, tmp_path / "packed", *precision(source, "auto", "auto"), Budgets().on_cpu()).loss


KEPT = {
    "bnb int8": "int8-f32",
    "bnb nf4": "nf4-f32",
    "ct int4 g32 bf16": "int4-g32-bf16",
    "ct int4 g64 fp16 asym": "int4-g64-f16-zp",
    "ct int8 g128 bf16": "int8-g128-bf16",
    "ct int8 rows": "int8-f32",
    "ct mixed": "int4-g32-bf16",
    "gptq v1": "int4-g32-f16-zp",
    "gptq v2 g128": "int4-g128-f16-zp",
    "awq": "int4-g32-f16-zp",
    "ct mxfp4": "mxfp4-e8m0",
    "mxfp4": "mxfp4-e8m0",
}


@pytest.mark.sample("ct int4 g64 fp16 asym", "bnb nf4")
@pytest.mark.parametrize("form", KEPT)
def test_kept_codes_mean_what_they_meant(
    form: str, tmp_path: Path, stock: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what has codes that no format has means what a byte a weight makes of it."""
    quantized, wide = tmp_path / "quantized", tmp_path / "wide"
    write_quantized(form, quantized, wide, "gpt_oss" if form == "mxfp4" else "qwen3_moe")
    if form == "ct mixed":
        pack_attention(wide)
    wanted = stock_logits(stock(wide))
    found = streamed_logits(quantized, tmp_path / "store", replace(SETTINGS, quant="kept"), monkeypatch)
    with Store.open(tmp_path / "store") as store:
        assert store.manifest.recipe["quant"] == KEPT[form]
        assert bool(store.manifest.extra["loss"]) == (form == "ct mixed")
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def pack_attention(folder: Path) -> None:
    """Rounds the matrices of attention, which are fp8 in the mixed checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "self_attn" in name and tensor.dim() == 2:
            tensors[name] = pack(tensor, BESIDE_KEPT).dequantize()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("form", "offered"),
    [
        ("fp8 blocks", ("int8", "int4", "nf4")),
        ("bnb int8", ("int8-f32", "int4", "nf4")),
        ("awq", ("int4-g32-f16-zp", "nf4")),
        ("ct mixed", ("int4-g32-bf16", "nf4")),
        ("gptq v1 act order", ("int8", "int4", "nf4")),
        ("gptq 3 bits", ("int8", "int4", "nf4")),
        ("", ("none", "int8", "int4", "nf4")),
    ],
)
def test_auto_offers_what_is_kept_or_at_least_the_bits_of_the_checkpoint(
    form: str, offered: tuple[str, ...], tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    folder = tmp_path / "quantized" if form else checkpoint("qwen3_moe")
    if form:
        write_quantized(form, folder, tmp_path / "wide")
    with open_source(str(folder)) as source:
        assert offered_formats(source.shape) == offered
        assert precision(source, "auto", "auto") == (offered[0], "fp32")
        # `moedge prepare` leaves codes as they are; floats it quantizes.
        assert default_format(source.shape) == (offered[0] if form else "nf4")
        request = PlanRequest(costs=CostModel(source.shape), workload=JOB, budget=MemoryBudget(1 << 34))
    assert SearchSpace(request).quants == offered


def test_the_loss_of_packing_again_is_measured_by_group(tmp_path: Path) -> None:
    write_quantized("fp8 blocks", tmp_path / "quantized", tmp_path / "wide")
    with open_source(str(tmp_path / "quantized")) as source:
        loss = prepare(source, tmp_path / "store", "nf4", "fp32", Budgets().on_cpu()).loss
    floats = load_file(tmp_path / "wide" / "model.safetensors")
    for group, part in (("experts", ".experts."), ("attention", ".self_attn.")):
        weights = [each for name, each in floats.items() if part in name and each.dim() == 2]
        errors = [pack(weight, "nf4").dequantize() - weight for weight in weights]
        wanted = torch.stack([e.norm() for e in errors]).norm() / torch.stack([w.norm() for w in weights]).norm()
        assert loss[group] == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_what_transformers_saves_through_bitsandbytes_is_read(bits: int, tmp_path: Path) -> None:
    import bitsandbytes.functional as bnb
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    save_tiny("llama", tmp_path / "wide", hidden_size=128)
    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "quantized")
    found = 0
    with Checkpoint(tmp_path / "quantized") as files:
        tensors = read_tensors(ModelConfig.read(tmp_path / "quantized"), files)
        for name, weight in tensors.quantized.items():
            stored = model.get_parameter(name)
            wanted = (
                bnb.dequantize_4bit(stored.data, stored.quant_state)
                if bits == 4
                else stored.data.float() * files_scale(files, name)[:, None] / 127
            )
            assert torch.allclose(dequantize(files, weight, torch.float32), wanted.float(), rtol=1e-6, atol=0)
            found += 1
    assert found == 4 * 7


def files_scale(files: Checkpoint, name: str) -> torch.Tensor:
    scale = torch.empty(files.entries[name].shape[0])
    files.read_into(f"{name.removesuffix('.weight')}.SCB", scale.view(torch.uint8).numpy().data)
    return scale


def test_codes_whose_groups_lie_apart_are_not_kept_whatever_the_config_says(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    write_quantized("gptq v1 act order", folder, tmp_path / "wide")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"]["desc_act"] = False
    (folder / "config.json").write_text(json.dumps(values))
    with open_source(str(folder)) as source:
        formats = precision(source, "kept", "fp32")
        with pytest.raises(BadCheckpoint, match="desc_act"):
            prepare(source, tmp_path / "store", *formats, Budgets().on_cpu())


def test_nothing_to_keep_is_said(checkpoint: Callable[[str], Path]) -> None:
    with open_source(str(checkpoint("qwen3_moe"))) as source, pytest.raises(SettingError, match="--quant kept"):
        precision(source, "kept", "fp32")
