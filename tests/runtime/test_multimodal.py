"""Checkpoints of models that also see run for text (`runtime/shape/families.py`, `runtime/shape/checkpoint_shape.py`):
tokens are those of the whole model, other parts are not read.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.model.definition import stock_tensor_shapes
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.checkpoint_shape import read_shape
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.families import SUPPORTED, WRAPPERS
from moedge.runtime.shape.formula import is_worked_out, shape_of_config
from support.family_run import run_checkpoint, tokens_of
from support.installed_transformers import NEWEST, installed, needs_transformers
from support.known_shapes import KIMI_K2, QWEN3_30B
from support.tiny_families import build_model, stored_numel
from support.tiny_wrappers import save_multimodal


def check_tokens(model_type: str, folder: Path, text: str | None = None) -> None:
    model = save_multimodal(model_type, folder / "checkpoint", text)
    # A class of 5.24 cannot answer text alone.
    stock = model.language_model if model_type == "llama4" else model
    assert run_checkpoint(folder, tokens_of(stock)).failure == ""
    own = stored_numel(build_model(text or WRAPPERS[model_type]))
    assert read_shape(folder / "checkpoint").parameters == own


def test_a_model_with_eyes_answers_text_as_a_whole(tmp_path: Path) -> None:
    check_tokens("mistral3", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", installed(sorted(WRAPPERS.keys() - {"mistral3"})))
def test_every_wrapper_answers_text_as_the_whole_model_does(model_type: str, tmp_path: Path) -> None:
    check_tokens(model_type, tmp_path)


# As Mistral Small 4, InternVL 3.5 with 30B-A3B and with gpt-oss.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "text"), [("mistral3", "mistral4"), ("internvl", "qwen3_moe"), ("internvl", "gpt_oss")]
)
def test_a_wrapper_has_whatever_text_model_its_file_names(model_type: str, text: str, tmp_path: Path) -> None:
    check_tokens(model_type, tmp_path, text)


def test_experts_may_lie_in_the_files_as_columns(tmp_path: Path) -> None:
    """As in Qwen3-VL's published files; transformers writes rows, which `check_tokens` reads."""
    model = save_multimodal("qwen3_vl_moe", tmp_path / "checkpoint", moe_intermediate_size=48)
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    turned = {name for name in tensors if ".experts." in name}
    assert {tensors[name].shape for name in turned} == {(8, 96, 64), (8, 64, 48)}
    rows = read_shape(tmp_path / "checkpoint")
    save_file(
        {name: each.transpose(1, 2).contiguous() if name in turned else each for name, each in tensors.items()}, path
    )
    assert read_shape(tmp_path / "checkpoint") == rows
    assert run_checkpoint(tmp_path, tokens_of(model)).failure == ""


@needs_transformers(NEWEST)
def test_text_models_are_those_of_transformers_own_classes() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert set(WRAPPERS.values()) <= set(SUPPORTED)
    for model_type, text in WRAPPERS.items():
        assert CONFIG_MAPPING[model_type]().get_text_config(decoder=True).model_type == text


# By their names: Kimi K2.5, Qwen3-VL-30B-A3B, Mistral-Small-4-119B and Muse-Spark-816B-A42B.
@pytest.mark.parametrize(
    ("whole", "text", "parameters", "active"),
    [
        ("kimi_k25", {**KIMI_K2, "auto_map": {"AutoModel": "modeling_kimi.Kimi"}}, 1.026e12, 32e9),
        ("qwen3_vl_moe", {**QWEN3_30B, "model_type": "qwen3_vl_moe_text"}, 30.5e9, 3.0e9),
        ("mistral3", {"model_type": "mistral4"}, 119e9, 6.1e9),
        pytest.param("muse_spark", {"num_local_experts": 256}, 816e9, 44e9, marks=needs_transformers("5.20")),
    ],
)
def test_a_published_size_is_worked_out_from_the_configuration_alone(
    whole: str, text: dict[str, Any], parameters: float, active: float
) -> None:
    config = ModelConfig({"model_type": whole, "text_config": text, "vision_config": {"hidden_size": 7}})
    shape = shape_of_config(config, "bfloat16", None if is_worked_out(config) else stock_tensor_shapes(config))
    assert shape.parameters == pytest.approx(parameters, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.02)
    assert shape.own_code == ("auto_map" in text)


def test_a_wrapper_that_changes_its_text_model_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'paligemma' has attention to the whole prompt in both directions"):
        ModelConfig({"model_type": "paligemma", "text_config": {"model_type": "gemma"}})
    with pytest.raises(UnsupportedModel, match=r"'new_vl' wraps a text model of type 'gemma'; docs/tables/models\.md"):
        ModelConfig({"model_type": "new_vl", "text_config": {"model_type": "gemma"}})


def test_the_text_model_decides_whether_a_wrapper_runs() -> None:
    with pytest.raises(UnsupportedModel, match="'mistral_large4_text' has latents that several"):
        ModelConfig({"model_type": "llava", "text_config": {"model_type": "mistral_large4_text"}})


def test_keys_of_other_parts_do_not_refuse_a_model(tmp_path: Path) -> None:
    save_multimodal("gemma4_unified", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "audio_config": {"conv_kernel_size": 5, "auto_map": {"A": "b.C"}}}))
    assert read_shape(tmp_path).model_type == "gemma4_unified_text"


def test_a_model_that_also_speaks_is_read_as_the_part_that_understands(tmp_path: Path) -> None:
    """As Qwen3-Omni's files have it."""
    save_multimodal("qwen3_omni_moe_thinker", tmp_path)
    wanted = read_shape(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"thinker.{name.replace('model.language_model.', 'model.')}": each for name, each in tensors.items()}
    speaking = {"talker.model.layers.0.mlp.gate.weight": torch.zeros(2, 3), "code2wav.norm.weight": torch.zeros(4)}
    save_file({**named, **speaking}, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "qwen3_omni_moe", "thinker_config": values, "talker_config": {"text_config": {}}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_shape(tmp_path) == wanted


def test_a_tensor_under_two_prefixes_is_refused(tmp_path: Path) -> None:
    save_multimodal("gemma4_unified", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors["model.language_model.norm.weight"]
    save_file({**tensors, "language_model.model.norm.weight": norm.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"norm\.weight' is in the files twice, under two prefixes"):
        read_shape(tmp_path)
