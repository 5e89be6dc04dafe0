"""Tiny checkpoints as llama.cpp's converter takes them, the files that it makes of them, and records of those files.

What a file does not say of its model has the value here that published models have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file

from moedge.offload.checkpoint.gguf_file import GgufCheckpoint
from support import tiny_families
from support.gguf_files import save_tokenizer

RECORDS = Path(__file__).parent / "gguf_records"
# Odd ones, and none that a permutation of which is its own inverse.
SIZES: dict[str, Any] = {
    "hidden_size": 96, "intermediate_size": 80, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 389, "num_experts": 12, "num_local_experts": 12,
    "n_routed_experts": 12, "moe_num_experts": 12, "num_experts_per_tok": 3, "moe_topk": 3, "moe_k": 3,
    "rms_norm_eps": 3e-6, "norm_eps": 3e-6, "layer_norm_eps": 3e-6, "layer_norm_epsilon": 3e-6, "norm_epsilon": 3e-6,
    "routed_scaling_factor": 1.5, "route_scale": 1.5, "max_position_embeddings": 4096,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 48,
}  # fmt: skip
_LATENT = {"num_key_value_heads": 6}
# By family, and what is special of a case behind `+`: sizes that replace those of tiny_families.SETTINGS: a file has
# what those leave out, or cannot say it.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": True, "num_dense_layers": 2, "num_shared_experts": 3},
    "arcee": {"attention_bias": True, "mlp_bias": True},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {"first_k_dense_replace": 1, "norm_topk_prob": False},
    "deepseek_v2": {
        **_LATENT, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "n_shared_experts": 3,
    },
    "deepseek_v3": {
        **_LATENT, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 20_000.0, "original_max_position_embeddings": 1024,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v32": {**_LATENT, "n_shared_experts": 3},
    "dots1": {"sliding_window": None, "max_window_layers": 99, "norm_topk_prob": True, "n_group": 4, "topk_group": 2},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {
        "use_bias": False, "moe_num_shared_experts": 3, "moe_layer_start_index": 2, "moe_layer_end_index": 2,
    },
    "exaone4": {"sliding_window_pattern": 4},
    "exaone4+all layers look back everywhere": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "exaone_moe": {
        "sliding_window_pattern": 4, "num_shared_experts": 2, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": False,
    },
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32, "final_logit_softcapping": 20.0},
    "gemma3_text": {},
    "gemma4_text": {
        "vocab_size_per_layer_input": 389, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_experts": 12,
        "top_k_experts": 3,
    },
    "gemma4_text+dense": {
        "enable_moe_block": False, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None,
        "vocab_size_per_layer_input": 262_144,
        "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
    },
    "gemma4_text+keys of other layers": {
        "vocab_size_per_layer_input": 389, "num_kv_shared_layers": 4, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", *["full_attention", "sliding_attention"] * 2, *["full_attention"] * 2],
        "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
    },
    "glm4": {},
    "glm4_moe": {
        "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 2, "n_shared_experts": 3,
    },
    "glm4_moe_lite": {**_LATENT, "first_k_dense_replace": 1},
    "gpt_oss": {},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "granitemoe": {"attention_bias": True},
    "granitemoehybrid": {
        "mamba_d_conv": 3, "mamba_expand": 3, "mamba_n_groups": 2, "mamba_conv_bias": False, "attention_bias": True,
    },
    "granitemoehybrid+dense": {"num_local_experts": 0, "num_experts_per_tok": 0},
    "granitemoeshared": {"attention_multiplier": 0.3, "shared_intermediate_size": 56},
    "hunyuan_v1_dense": {"attention_bias": True},
    "hunyuan_v1_moe": {"attention_bias": True},
    "jamba": {"mamba_d_conv": 3, "mamba_expand": 3, "mamba_dt_rank": 5, "mamba_conv_bias": False},
    "lfm2": {"conv_L_cache": 4},
    "lfm2_moe": {"tie_word_embeddings": True, "routed_scaling_factor": 1.0, "conv_L_cache": 4},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama4_text": {
        "attention_chunk_size": 8192, "no_rope_layer_interval": 4, "floor_scale": 8192, "attn_scale": 0.1,
        "intermediate_size": 40, "intermediate_size_mlp": 80,
    },
    "minimax_m2": {"rotary_dim": 16},
    "mixtral": {"sliding_window": None},
    "nemotron_h": {
        "time_step_min": 0.001, "moe_shared_expert_intermediate_size": 56, "conv_kernel": 3, "use_conv_bias": False,
        "n_group": 4, "topk_group": 2, "norm_topk_prob": False,
    },
    "nemotron_h+dense": {
        "time_step_min": 0.001, "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
    },
    "nemotron_h+latent experts": {
        "time_step_min": 0.001, "moe_latent_size": 48, "moe_shared_expert_intermediate_size": 56,
    },
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"clip_qkv": None, "num_key_value_heads": 6, "rms_norm_eps": 1e-5},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.75}},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": {**_DELTA, "linear_conv_kernel_dim": 3, "attention_bias": True},
    "qwen3_moe": {},
    "qwen3_next": {**_DELTA, "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"] * 2},
    "seed_oss": {"attention_bias": False, "attention_out_bias": True},
    "smollm3": {
        "use_sliding_window": False, "sliding_window": None, "no_rope_layer_interval": 4, "attention_bias": True,
    },
    "starcoder2": {"sliding_window": 4096, "use_bias": False},
    "youtu": _LATENT,
}  # fmt: skip
# As published, and not as transformers' class writes it; None for what is not there.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "exaone4+all layers look back everywhere": {"sliding_window_pattern": None},
    "nemotron_h+dense": dict.fromkeys(
        (
            "num_experts_per_tok",
            "n_routed_experts",
            "n_shared_experts",
            "moe_intermediate_size",
            "n_group",
            "topk_group",
            "moe_shared_expert_intermediate_size",
            "routed_scaling_factor",
            "norm_topk_prob",
        ),
    ),
    "minimax_m2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, "rotary_dim": 16},
}  # fmt: skip
# What the converter wants of published files besides, which say it twice or in another way.
_CONVERTED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "granitemoehybrid+dense": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_moe": {"moe_intermediate_size": [80] * 4, "moe_topk": [3] * 4, "num_shared_expert": [1] * 4},
}  # fmt: skip


def family_of(case: str) -> str:
    return case.partition("+")[0]


def save(case: str, folder: Path) -> None:
    """Writes a tiny random checkpoint as one of the case's family is published."""
    family = family_of(case)
    own = {**tiny_families.SETTINGS.get(family, {}), **FAMILIES[case]}
    with patch.dict(tiny_families.SETTINGS, {family: own}):
        model = tiny_families.build_model(family, **{name: SIZES[name] for name in SIZES.keys() - own.keys()})
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)
    config = json.loads((folder / "config.json").read_text()) | _PUBLISHED.get(case, {})
    lacking = {name for name, value in _PUBLISHED.get(case, {}).items() if value is None}
    config = {name: value for name, value in config.items() if name not in lacking}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "converted.json").write_text(json.dumps(config | _CONVERTED.get(case, {})))
    if family in _PREDICTING:
        _add_predicting_layer(family, folder / "model.safetensors", config["num_hidden_layers"])


# Those that are published with a layer that predicts the token after the next one; its names, and what it has besides.
_PREDICTING = {
    "glm4_moe": ("model.layers.{}", ("eh_proj", "enorm", "hnorm", "shared_head.norm"), "model.layers.{}"),
    "qwen3_5_moe_text": ("mtp.layers.0", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "mtp"),
}


def _add_predicting_layer(family: str, file: Path, num_layers: int) -> None:
    """A copy of the last layer under the names of such a layer."""
    layer, others, prefix = _PREDICTING[family]
    layer, prefix = layer.format(num_layers), prefix.format(num_layers)
    tensors = load_file(file)
    last = f"model.layers.{num_layers - 1}."
    added = {name.replace(last, f"{layer}."): tensor.clone() for name, tensor in tensors.items() if last in name}
    hidden = SIZES["hidden_size"]
    for index, name in enumerate(others):
        added[f"{prefix}.{name}.weight"] = torch.rand((hidden, 2 * hidden) if index == 0 else (hidden,))
    save_file(tensors | added, file, {"format": "pt"})


def convert(source: Path, checkpoint: Path, file: Path, kind: str = "ALL_F32", *options: str) -> None:
    """Converts with llama.cpp's converter in the folder `source`. Raises RuntimeError."""
    command = [sys.executable, str(Path(__file__).with_name("gguf_driver.py")), checkpoint, file, kind, *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(source / "gguf-py")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"the converter failed: {done.stderr.strip().splitlines()[-1]}")


_SAMPLES = 2


def filled(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers of a checkpoint's tensor, by which those of a file are known again."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))


def places(name: str, numel: int) -> torch.Tensor:
    """Where samples of a file's tensor are taken."""
    return torch.randint(numel, (_SAMPLES,), generator=torch.Generator().manual_seed(crc32(name.encode())))


def record(source: Path, case: str, folder: Path) -> dict[str, Any]:
    """What the converter makes of a checkpoint whose tensors are filled: keys, names, shapes and samples of numbers.

    Of the factors of rotary frequencies all numbers are kept, because the configuration is read from them.
    """
    save(case, folder)
    model = folder / "model.safetensors"
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(model).items()}
    save_file({name: filled(name, shape) for name, shape in shapes.items()}, model, {"format": "pt"})
    convert(source, folder, folder / "model.gguf")
    with GgufCheckpoint(folder / "model.gguf") as files:
        kept = {key: value for key, value in files.metadata.items() if not key.startswith(("tokenizer.", "general."))}
        tensors = {}
        for name, entry in files.entries.items():
            data = torch.empty(entry.shape)
            files.read_into(name, data.numpy().data.cast("B"))
            chosen = data.flatten() if name == "rope_freqs.weight" else data.flatten()[places(name, data.numel())]
            tensors[name] = [list(entry.shape), [float(f"{number:.5g}") for number in chosen.tolist()]]
        architecture = files.metadata["general.architecture"]
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "metadata": {"general.architecture": architecture, **kept},
        "tensors": tensors,
    }


def record_of(case: str) -> Path:
    return RECORDS / f"{case.replace(' ', '_')}.json"


def write_record(record: dict[str, Any], path: Path) -> None:
    """A line for each tensor and each key, so that a change shows."""
    parts = []
    for name, values in record.items():
        lines = (f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in values.items())
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def exact_in_blocks(file: Path) -> None:
    """Makes matrices such as Q8_0 holds exactly: multiples of 1/256, one of any 32 neighbours the largest there is."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            codes = (tensor * 256).round().clamp(-127, 127)
            diagonal = torch.arange(tensor.shape[-2])[:, None] + torch.arange(tensor.shape[-1])
            largest = torch.where(codes < 0, -127.0, 127.0)
            # A tied head otherwise repeats the last token for ever.
            tensors[name] = torch.where(diagonal % 8 == 0, largest, codes) / (4096 if "embed_tokens" in name else 256)
    save_file(tensors, file, {"format": "pt"})
