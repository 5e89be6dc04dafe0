"""Checkpoints with code of their own (`auto_map`): it is never run (`runtime/shape/config.py`); transformers' class
computes the family.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from moedge.plan_report import plan
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.checkpoint_shape import read_shape
from moedge.runtime.shape.config import ModelConfig
from support.family_run import run_checkpoint, tokens_of
from support.tiny_families import save_tiny


def names_of(part: str, model: str) -> dict[str, str]:
    return {
        "AutoConfig": f"configuration_{part}.{model}Config",
        "AutoModel": f"modeling_{part}.{model}Model",
        "AutoModelForCausalLM": f"modeling_{part}.{model}ForCausalLM",
    }


# As they are published: the fields of config.json that their authors' own code reads.
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": names_of("deepseek", "DeepseekV3"), "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "n_routed_experts": 384, "topk_group": 1,
    "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "vocab_size": 163840,
    "max_position_embeddings": 131072, "routed_scaling_factor": 2.827, "seq_aux": True, "pad_token_id": 163839,
}  # fmt: skip
ATTENDING = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "auto_map": names_of("kimi", "KimiLinear"), "bos_token_id": 163584,
    "dtype": "bfloat16", "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
    "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216, "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": ATTENDING, "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [layer for layer in range(1, 28) if layer not in ATTENDING],
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


@pytest.mark.parametrize("values", [DEEPSEEK_V3, KIMI_K2, KIMI_LINEAR], ids=lambda values: str(values["model_type"]))
def test_a_published_configuration_that_names_code_is_read(values: dict[str, Any]) -> None:
    config = ModelConfig(values)
    assert config.own_code
    assert not ModelConfig({name: value for name, value in values.items() if name != "auto_map"}).own_code


def write_code(folder: Path) -> None:
    """Code beside the checkpoint that config.json names for everything, and that leaves a file where it runs."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"auto_map": names_of("evil", "Evil")}
    path.write_text(json.dumps(values))
    for name in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


@pytest.mark.slow
def test_a_checkpoint_s_own_code_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    model = save_tiny("kimi_linear", folder)
    write_code(folder)
    assert run_checkpoint(tmp_path, tokens_of(model)).failure == ""
    assert not (folder / "ran").exists()


def test_a_plan_says_that_a_checkpoint_s_own_code_is_not_run(tmp_path: Path) -> None:
    save_tiny("kimi_linear", tmp_path)
    assert not read_shape(tmp_path).own_code
    write_code(tmp_path)
    found = plan(tmp_path, ram="2GiB", gpu_mem="0")
    assert "".join(found.document["plan"]["notes"]) == (
        "the checkpoint's own code (auto_map) is not run: kimi_linear is computed by transformers' class"
    )
    assert not (tmp_path / "ran").exists()


def test_code_for_a_family_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil_moe"}))
    write_code(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"model type 'evil_moe' is not supported.* code of its own .*never run"):
        read_shape(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_code_named_for_a_model_inside_another_is_not_run() -> None:
    inner = {**DEEPSEEK_V3, "model_type": "llama", "num_key_value_heads": 128, "quantization_config": None}
    assert ModelConfig({"model_type": "llava", "text_config": inner}).own_code
