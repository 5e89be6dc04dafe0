"""Config against headers (`runtime/shape/checkpoint_shape.py`): what transformers writes passes, what planning would
get wrong is refused without torch.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.offload.errors import BadCheckpoint
from moedge.runtime.model.definition import define
from moedge.runtime.model.loading import CheckpointLoader
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.checkpoint_shape import check_tensors, open_checkpoint, read_shape
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.read import by_layer, kv_groups
from support.tiny_families import FEATURES, stored_numel, tiny_config


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Sizes that differ from each other, so that no transposition passes by chance."""
    heads = rng.choice([2, 4])
    return {
        "num_hidden_layers": 4, "num_attention_heads": heads, "num_key_value_heads": rng.choice([1, 2]),
        "hidden_size": heads * rng.choice([6, 10, 14]), "vocab_size": 70, "intermediate_size": rng.choice([22, 26]),
        "moe_intermediate_size": rng.choice([18, 34]), "num_experts": 3, "num_local_experts": 3,
        "n_routed_experts": 3, "num_experts_per_tok": 2, "attention_bias": rng.random() < 0.4,
        "mlp_bias": rng.random() < 0.4, "tie_word_embeddings": rng.random() < 0.5, "pad_token_id": None,
        "decoder_sparse_step": rng.choice([1, 2]), "mlp_only_layers": rng.choice([[], [0]]), "sliding_window": 8,
    }  # fmt: skip


@pytest.mark.sample(
    "deepseek_v3-0", "gemma4_text-0", "gpt_oss-0", "kimi_linear-0", "laguna-0", "llama4_text-0", "longcat_flash-0",
    "nemotron_h-0",
)  # fmt: skip
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("family", FEATURES)
def test_what_transformers_writes_passes(family: str, number: int, tmp_path: Path) -> None:
    """In random settings, as a shape of as many parameters, and as headers that fill the meta model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = tiny_config(family, **random_settings(random.Random(f"{family} {number}")))
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.save_pretrained(tmp_path)
    assert read_shape(tmp_path).parameters == stored_numel(model)
    read = ModelConfig.read(tmp_path)
    with open_checkpoint(read, tmp_path) as files:
        CheckpointLoader(define(read, torch.float32), files, torch.float32).check()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe"])
def test_experts_as_the_modules_hold_them_are_wanted_too(
    family: str, checkpoint: Callable[[str], Path], stock: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint(family), tmp_path / "copy")
    tensors = dict(stock(folder).named_parameters())
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert read_shape(folder) == read_shape(checkpoint(family))


@pytest.mark.parametrize(
    ("given", "heads", "head_dim"),
    [
        ({"hidden_size": 2048, "num_attention_heads": 16}, 16, 128),
        ({"hidden_size": 5120, "num_attention_heads": 40}, 40, 128),
    ],
)
def test_head_sizes_that_a_config_leaves_out_follow_from_its_others(
    given: dict[str, int], heads: int, head_dim: int
) -> None:
    """Not from the family's defaults, which are those of one model."""
    (group,) = kv_groups(ModelConfig({"model_type": "llama", **given}))
    assert (group.kv_heads, group.head_dim) == (heads, head_dim)


Spoiled = Callable[..., Path]


@pytest.fixture
def spoiled(checkpoint: Callable[[str], Path], tmp_path: Path) -> Spoiled:
    """A checkpoint whose tensors an edit changed, or whose config `values` replace."""

    def make(edit: Callable[[dict[str, torch.Tensor]], object] = bool, **values: Any) -> Path:
        folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "copy")
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))
        return folder

    return make


def check(folder: Path, files: Checkpoint) -> None:
    config = ModelConfig.read(folder)
    check_tensors(config, files, by_layer(config, files.entries))


def refusal(folder: Path) -> str:
    """Without torch, by what planning relies on."""
    with Checkpoint(folder) as files, pytest.raises(BadCheckpoint) as refused:
        check(folder, files)
    return str(refused.value)


def late_refusal(folder: Path) -> str:
    """By transformers' own conversion, which a reader without torch cannot do; no weight is read."""
    with Checkpoint(folder) as files:
        check(folder, files)
        files.read_into = None  # type: ignore[assignment]
        loader = CheckpointLoader(define(ModelConfig.read(folder), torch.float32), files, torch.float32)
        with pytest.raises(BadCheckpoint) as refused:
            loader.check()
    return str(refused.value)


K, Q = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.q_proj.weight"


def test_keys_decide_the_cache_so_they_are_compared(spoiled: Spoiled) -> None:
    says = refusal(spoiled(lambda tensors: tensors.update({K: torch.zeros(3, 5)})))
    assert f"layer 1: {K} is [3, 5], wanted [32, 64]" in says


def test_experts_are_counted(spoiled: Spoiled) -> None:
    says = refusal(spoiled(num_local_experts=9, num_experts=9))
    assert "layer 3: the files hold [8] experts, wanted 9" in says


def test_at_most_ten_differences_are_told(spoiled: Spoiled) -> None:
    says = refusal(spoiled(vocab_size=385, num_local_experts=9, num_experts=9, head_dim=34, num_key_value_heads=1))
    assert says.count("wanted") == 10


def test_layers_are_counted(spoiled: Spoiled) -> None:
    assert "layers 0 to 3, 4 of them, config.json wants num_hidden_layers 5" in refusal(spoiled(num_hidden_layers=5))


def test_layers_that_guess_further_tokens_are_left_out(spoiled: Spoiled, checkpoint: Callable[[str], Path]) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name.replace("layers.3.", "layers.4."): tensors[name].clone() for name in list(tensors)})

    folder = spoiled(add, num_nextn_predict_layers=1)
    assert read_shape(folder) == read_shape(checkpoint("qwen3_moe"))


def test_weights_must_be_floats(spoiled: Spoiled) -> None:
    says = refusal(spoiled(lambda tensors: tensors.update({Q: tensors[Q].to(torch.int32)})))
    assert f"'{Q}' is I32, wanted one of" in says


@pytest.mark.parametrize("shape", [(), (64,), (2, 3, 4)])
def test_an_expert_s_tensor_that_is_no_matrix_is_refused(spoiled: Spoiled, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    folder = spoiled(lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises((BadCheckpoint, UnsupportedModel), match="experts"):
        read_shape(folder)


def test_a_misshaped_tensor_is_named(spoiled: Spoiled) -> None:
    says = late_refusal(spoiled(lambda tensors: tensors.update({Q: torch.zeros(3, 5)})))
    assert f"{Q} is [3, 5], wanted [64, 64]" in says


def test_missing_and_extra_tensors_are_told_together(spoiled: Spoiled) -> None:
    says = late_refusal(spoiled(lambda tensors: tensors.update({"model.layers.1.evil": tensors.pop(Q)})))
    assert f"{Q} is missing" in says
    assert "'model.layers.1.evil' belongs to no part of the model" in says


def test_a_width_that_only_the_model_knows_is_found(spoiled: Spoiled) -> None:
    assert "experts.down_proj is [8, 64, 64], wanted [8, 64, 63]" in late_refusal(spoiled(moe_intermediate_size=63))
