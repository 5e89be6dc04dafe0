"""The tensors that a config promises are those that transformers writes for it, in every family and setting."""

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
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.contradictions import check_tensors
from moedge.runtime.shape.families import SUPPORTED
from moedge.runtime.shape.folder import read_shape
from moedge.runtime.shape.read import kv_groups


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Sizes that differ from each other, so that no transposition passes by chance."""
    heads = rng.choice([2, 4])
    return {
        "num_hidden_layers": rng.randint(1, 4), "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2]), "hidden_size": heads * rng.choice([6, 10, 14]), "vocab_size": 70,
        "intermediate_size": rng.choice([22, 26]), "moe_intermediate_size": rng.choice([18, 34]), "num_experts": 3,
        "num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": rng.random() < 0.4,
        "mlp_bias": rng.random() < 0.4, "tie_word_embeddings": rng.random() < 0.5, "pad_token_id": None,
        "decoder_sparse_step": rng.choice([1, 2]), "mlp_only_layers": rng.choice([[], [0]]), "sliding_window": 8,
    }  # fmt: skip


def written_by_transformers(family: str, settings: dict[str, Any], folder: Path) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = CONFIG_MAPPING[family]().to_dict().keys() | {"head_dim"}
    config = CONFIG_MAPPING[family](**{name: value for name, value in settings.items() if name in known})
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", SUPPORTED)
def test_what_transformers_writes_is_what_is_wanted(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    for number in range(6):
        settings = random_settings(rng)
        if rng.random() < 0.5 and family not in {"olmoe", "granitemoe"}:
            settings["head_dim"] = 8
        folder = tmp_path / str(number)
        model = written_by_transformers(family, settings, folder)
        assert read_shape(folder).parameters == sum(parameter.numel() for parameter in model.parameters()), settings


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "granitemoe"])
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


def refusal(folder: Path) -> str:
    with Checkpoint(folder) as files, pytest.raises(BadCheckpoint) as refused:
        check_tensors(ModelConfig.read(folder), files)
    return str(refused.value)


@pytest.fixture
def spoiled(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., str]:
    """The refusal of a checkpoint whose tensors an edit changed, or whose config `values` replace."""

    def make(edit: Callable[[dict[str, torch.Tensor]], object] = bool, **values: Any) -> str:
        folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "copy")
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))
        return refusal(folder)

    return make


Q = "model.layers.1.self_attn.q_proj.weight"


def test_a_refusal_names_file_tensor_found_and_wanted(spoiled: Callable[..., str]) -> None:
    says = spoiled(lambda tensors: tensors.update({Q: torch.zeros(3, 5)}))
    assert f"model.safetensors: {Q} is [3, 5], wanted [128, 64]" in says


def test_missing_and_extra_tensors_are_told_together(spoiled: Callable[..., str]) -> None:
    says = spoiled(lambda tensors: tensors.update({"model.layers.1.evil": tensors.pop(Q)}))
    assert "layer 1: self_attn.q_proj.weight [128, 64] is missing" in says
    assert "'model.layers.1.evil' belongs to no part of the model" in says


def test_at_most_ten_differences_are_told(spoiled: Callable[..., str]) -> None:
    says = spoiled(vocab_size=385, num_local_experts=9, num_experts=9, moe_intermediate_size=63)
    assert says.count("wanted [") <= 10
    assert "; and 76 more" in says


def test_layers_are_counted(spoiled: Callable[..., str]) -> None:
    assert "layers 0 to 2, 3 of them, config.json wants num_hidden_layers 5" in spoiled(num_hidden_layers=5)


def test_weights_must_be_floats(spoiled: Callable[..., str]) -> None:
    says = spoiled(lambda tensors: tensors.update({Q: tensors[Q].to(torch.int32)}))
    assert f"'{Q}' is I32, wanted one of" in says
