"""Generates `runtime/shape/defaults.json`: what only transformers' config classes know, for code without torch.

Run it as `make tables`; a test rebuilds the table and compares.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from moedge.runtime import shape
from moedge.runtime.shape.config_fields import LAYER_KINDS
from moedge.runtime.shape.families import SUPPORTED

# The fields of a config that runtime/shape reads.
_FIELDS = (
    "attention_chunk_size", "attention_k_eq_v", "conv_kernel", "conv_L_cache", "enable_moe_block",
    "first_k_dense_replace", "global_attn_every_n_layers", "hc_count", "head_dim", "heads_per_ngram", "hidden_size",
    "index_block_size", "index_head_dim", "index_n_heads", "index_topk", "index_topk_blocks",
    "intermediate_size", "kv_lora_rank", "linear_conv_kernel_dim", "linear_head_dim", "linear_key_head_dim",
    "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "mamba_d_conv",
    "mamba_d_ssm", "mamba_d_state", "mamba_expand", "mamba_head_dim", "mamba_n_groups", "mamba_n_heads",
    "mamba_ngroups", "mamba_num_heads", "max_position_embeddings", "max_window_layers", "moe_k", "moe_num_experts",
    "moe_topk", "n_groups", "n_mamba_heads", "n_routed_experts", "ngram_size", "no_rope_layer_interval",
    "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
    "num_layers", "num_local_experts", "num_mem_blocks", "num_nextn_predict_layers", "pad_token_id",
    "ple_conv_kernel_size", "prefix_dense_sliding_window_pattern", "qk_nope_head_dim",
    "qk_rope_head_dim", "short_conv_kernel_size", "sliding_window", "sliding_window_pattern", "ssm_state_size",
    "tie_word_embeddings", "top_k_experts", "use_sliding_window", "v_head_dim", "vocab_size", "zero_expert_num",
)  # fmt: skip


def rebuild() -> dict[str, Any]:
    """The table, by `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return {model_type: _entry(CONFIG_MAPPING[model_type]) for model_type in SUPPORTED}


def _entry(config_class: Any) -> dict[str, Any]:
    # The class's own defaults: an instance computes some of them from others, such as head_dim.
    values = {field.name: field.default for field in dataclasses.fields(config_class)}
    rope = config_class().to_dict().get("rope_parameters") or {}
    by_kind = bool(rope.keys() & LAYER_KINDS) or config_class.model_type in _BY_KIND
    parts = list(rope.values()) if by_kind else [rope]
    return {
        "defaults": {name: values[name] for name in _FIELDS if name in values},
        "aliases": dict(sorted((_counted(values) | config_class.attribute_map).items())),
        "rope_by_kind": by_kind,
        "partial_rotary": any("partial_rotary_factor" in (part or {}) for part in parts)
        or "rotary_dim" in values
        or config_class.model_type in _PARTIAL,
        "transposed_experts": config_class.model_type in _TRANSPOSED,
    }


def _counted(values: dict[str, Any]) -> dict[str, str]:
    """One family counts its layers under another name, and derives `num_hidden_layers` from it."""
    return {} if "num_hidden_layers" in values else {"num_hidden_layers": "num_layers"}


# Families whose experts are [E, in, out]: a test compares this with the modules.
_TRANSPOSED = {"aria_text", "gpt_oss", "llama4_text"}

# Families whose modules leave elements unrotated where a file says so, and whose defaults do not say it.
_PARTIAL = {"glm4v_text", "qwen4_exp_text", "step3p5"}
# One whose files give rotary parameters for each kind of layer, and whose defaults give none.
_BY_KIND = {"cohere_compass_text"}


def main() -> None:
    path = Path(shape.__path__[0]) / "defaults.json"
    path.write_text(json.dumps(rebuild(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
