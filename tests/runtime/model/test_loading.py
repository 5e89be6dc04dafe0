"""Loading a layer at a time gives the parameters that transformers itself loads, to the bit, or a refusal."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.model.definition import define
from moedge.runtime.model.loading import CheckpointLoader
from moedge.runtime.shape.checkpoint_shape import open_checkpoint
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.families import SHARING
from moedge.runtime.shape.read import shared_name
from support.tiny_families import FEATURES


def load(folder: Path, dtype: torch.dtype = torch.float32, window: int = 3) -> Any:
    """The stock model filled by our loader: dense parts, then `window` experts at a time."""
    config = ModelConfig.read(folder)
    model = define(config, dtype)
    with open_checkpoint(config, folder) as checkpoint:
        loader = CheckpointLoader(model, checkpoint, dtype)
        for index, layer in enumerate(model.get_decoder().layers):
            loader.load_dense(index, layer)
            for module in [module for module in layer.modules() if hasattr(module, "is_transposed")]:
                load_experts(loader, index, module, window)
            assert not any(parameter.is_meta for parameter in layer.parameters())
        loader.load_rest()
    return model


def load_experts(loader: CheckpointLoader, index: int, module: Any, window: int) -> None:
    count, parts = module.num_experts, []
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    for begin in range(0, count, window):
        experts = range(begin, min(begin + window, count))
        parts.append(loader.load_experts(index, module, up_name, experts))
        assert len(parts[-1][0]) == len(experts)
        assert module.down_proj.is_meta, "the whole layer's experts must not be held"
    for name, tensors in zip((up_name, "down_proj"), zip(*parts, strict=True), strict=True):
        whole = torch.cat(tensors)
        setattr(module, name, torch.nn.Parameter(whole.transpose(1, 2) if module.is_transposed else whole))


def test_the_names_of_transformers_that_are_not_public_are_still_there() -> None:
    """The day this fails, only runtime/model/loading.py has to change."""
    import inspect

    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    assert list(inspect.signature(convert_and_load_state_dict_in_model).parameters)[:3] == [
        "model", "state_dict", "load_config",
    ]  # fmt: skip
    assert {"weight_mapping", "dtype"} <= set(inspect.signature(LoadStateDictConfig).parameters)
    assert "model" in inspect.signature(get_model_conversion_mapping).parameters


# Experts apart, stacked, transposed and renamed; matrices that no other family has.
@pytest.mark.sample(
    "deepseek_v3",
    "gemma4_text",
    "gpt_oss",
    "granitemoe",
    "laguna",
    "llama4_text",
    "longcat_flash",
    "mixtral",
    "qwen3_moe",
)
@pytest.mark.parametrize("family", FEATURES)
def test_parameters_are_bit_equal(family: str, checkpoint: Callable[[str], Path], stock: Callable[[Path], Any]) -> None:
    folder = checkpoint(family)
    ours, theirs = load(folder).state_dict(), stock(folder).state_dict()
    # Of a forward that is replaced.
    theirs = {name: value for name, value in theirs.items() if not name.endswith("_decay")}
    if family in SHARING:
        # transformers names a block once for each layer that uses it.
        theirs = {shared_name(ModelConfig.read(folder), name): value for name, value in theirs.items()}
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        if family == "longcat_flash" and name.endswith("experts.gate_up_proj"):
            # transformers makes matrices for experts that return their input, too, and never multiplies with them.
            wanted = wanted[: len(ours[name])]
        assert torch.equal(ours[name], wanted), name


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def rename(tensors: dict[str, torch.Tensor], old: str, new: str | None) -> None:
    tensor = tensors.pop(old)
    if new is not None:
        tensors[new] = tensor


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda tensors: rename(tensors, Q, None), "layer 1: 1 parameters are not in the files"),
        (lambda tensors: rename(tensors, "model.norm.weight", None), "1 parameters are not in the files"),
        (lambda tensors: tensors.update({Q: tensors[Q][:-1]}), "has shape"),
        (lambda tensors: tensors.update({"model.layers.1.evil.weight": torch.zeros(2)}), "belong to no part"),
        (
            lambda tensors: rename(tensors, "model.layers.2.mlp.experts.3.up_proj.weight", None),
            "convert|parameters|shape",
        ),
    ],
)
def test_missing_extra_and_misshaped_tensors_are_refused(
    edit: Callable[[dict[str, torch.Tensor]], None], says: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = change(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "copy"), edit)
    with pytest.raises(BadCheckpoint, match=says):
        load(folder)


def test_a_tied_head_is_one_tensor(checkpoint: Callable[[str], Path]) -> None:
    model = load(checkpoint("granitemoe"))
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_config_and_dtype_reach_the_model(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("gpt_oss")
    model = load(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config.sliding_window == json.loads((folder / "config.json").read_text())["sliding_window"]


def conversions(monkeypatch: pytest.MonkeyPatch, folder: Path, dtype: torch.dtype) -> int:
    """How many windows of experts transformers converted."""
    counted: list[range] = []
    convert = CheckpointLoader._convert_experts

    def counting(self: Any, index: int, experts: Any, up_name: str, window: range, kept: Any) -> Any:
        counted.append(window)
        return convert(self, index, experts, up_name, window, kept)

    monkeypatch.setattr(CheckpointLoader, "_convert_experts", counting)
    wanted = load(folder, dtype, window=1).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in load(folder, dtype, window=2).state_dict().items())
    return len(counted)


def test_experts_are_joined_as_they_are_read_once_that_gave_the_bytes_of_transformers(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_moe")
    windows = 3 * json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert conversions(monkeypatch, folder, torch.float32) == 2
    assert conversions(monkeypatch, folder, torch.bfloat16) > windows, "numbers that are rounded are transformers'"

    def share(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name and "gate_proj" in name]:
            tensors[name.replace("gate_proj", "up_proj")] = tensors[name].clone()

    same = change(shutil.copytree(folder, tmp_path / "same"), share)
    assert conversions(monkeypatch, same, torch.float32) > windows, "which part is above the other does not show"
