"""The fields of config.json that reach a model, and the values each may have. Knows no family and no tensor.

An allow-list: what is not in it is dropped, because a key that transformers knows and this table does not can name
code or decide an allocation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...offload.checkpoint.header import described
from ..settings.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class NumberField:
    """An integer from `least` to `most`, both included."""

    least: float
    most: float
    whole: bool = False

    def admits(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return math.isfinite(value) and self.least <= value <= self.most

    def __str__(self) -> str:
        return f"a {'whole number' if self.whole else 'number'} from {self.least:g} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some values, of the same type."""

    values: tuple[bool | str | None, ...]

    def admits(self, value: object) -> bool:
        return any(type(value) is type(each) and value == each for each in self.values)

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.values))}"


def _whole(least: int, most: int) -> NumberField:
    return NumberField(least, most, whole=True)


@dataclass(frozen=True, slots=True)
class AutoOr:
    """A number, or "auto"."""

    number: NumberField

    def admits(self, value: object) -> bool:
        return value == "auto" or self.number.admits(value)

    def __str__(self) -> str:
        return f"{self.number}, or 'auto'"


@dataclass(frozen=True, slots=True)
class OrNull:
    """A number, or null."""

    number: NumberField

    def admits(self, value: object) -> bool:
        return value is None or self.number.admits(value)

    def __str__(self) -> str:
        return f"{self.number}, or null"


_FLAG = Choice((True, False))
_SCALE = NumberField(1e-6, 1e6)
_EPSILON = NumberField(1e-20, 1)  # Zero would make NaN of a row of zeros.
_ACTIVATION = Choice(
    ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "xielu", "sqrtsoftplus")
)
_LENGTH = _whole(1, 1 << 28)
_TOKEN = _whole(-1, 1 << 20)
_WIDTH = _whole(1, 1 << 20)
_HEADS = _whole(1, 1_024)
_HEAD_DIM = _whole(2, 1_024)
_TAPS = _whole(2, 64)
_STATE = _whole(1, 4_096)
_COUNT = _whole(1, 1_024)
_SOME = _whole(0, 1_024)
_LAYERS = _whole(1, 512)
_LAYER = _whole(0, 512)
Rule = NumberField | Choice | AutoOr | OrNull
FIELDS: dict[str, Rule] = {
    # Sizes
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "hidden_size": _whole(1, 65_536),
    "intermediate_size": _WIDTH,
    "intermediate_size_mlp": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "shared_intermediate_size": _whole(0, 1 << 20),
    "prefix_dense_intermediate_size": _WIDTH,
    "dense_intermediate_size": _WIDTH,
    "ffn_hidden_size": _WIDTH,
    "moe_latent_size": _WIDTH,
    "moe_hidden_size": _WIDTH,
    "share_expert_dim": _WIDTH,
    "moe_shared_expert_intermediate_size": _WIDTH,
    "shared_experts_intermediate_size": _WIDTH,
    "block_multiple_of": _WIDTH,
    "expert_ffn_hidden_size": _WIDTH,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "num_global_key_value_heads": _HEADS,
    "num_sliding_attention_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "v_head_dim": _HEAD_DIM,
    "global_head_dim": _HEAD_DIM,
    "rotary_dim": _HEAD_DIM,
    "kv_lora_rank": _whole(2, 8_192),
    "q_lora_rank": _WIDTH,
    "qk_nope_head_dim": _HEAD_DIM,
    "qk_rope_head_dim": _HEAD_DIM,
    "qk_head_dim": _HEAD_DIM,
    # Of layers that slide, in older files of dots3.
    "swa_num_attention_heads": _HEADS,
    "swa_num_key_value_heads": _HEADS,
    "swa_head_dim": _HEAD_DIM,
    "swa_v_head_dim": _HEAD_DIM,
    "swa_kv_lora_rank": _whole(2, 8_192),
    "swa_q_lora_rank": _WIDTH,
    "swa_qk_nope_head_dim": _HEAD_DIM,
    "swa_qk_rope_head_dim": _HEAD_DIM,
    "swa_rope_theta": NumberField(2, 1e12),
    "gated_norm_rank": _WIDTH,
    "index_topk": _LENGTH,
    "index_head_dim": _HEAD_DIM,
    "index_n_heads": _HEADS,
    "index_block_size": _LENGTH,
    "index_topk_blocks": _LENGTH,
    "index_local_blocks": _SOME,
    "indexer_n_heads": _HEADS,
    "indexer_kv_heads": _whole(1, 1),
    "indexer_head_dim": _HEAD_DIM,
    "indexer_budget": _LENGTH,
    "indexer_compress_ratio": _COUNT,
    "vocab_size": _whole(2, 1 << 20),
    # A head with fewer rows than the embedding.
    "output_vocab_size": Choice((None,)),
    "vocab_size_per_layer_input": _whole(2, 1 << 20),
    "hidden_size_per_layer_input": _whole(0, 65_536),
    "max_position_embeddings": _LENGTH,
    "original_max_position_embeddings": _LENGTH,
    # Residual streams
    "hc_count": _whole(2, 64),
    "hc_lowrank": _WIDTH,
    # Tables of n-grams
    "ple_embed_dim": _WIDTH,
    "ple_conv_kernel_size": _TAPS,
    "ngram_size": _whole(2, 16),
    "heads_per_ngram": _HEADS,
    "ngram_vocab_size_base": _LENGTH,
    "make_ngram_vocab_size_divisible_by": _WIDTH,
    "seed": _whole(0, 1 << 62),
    "split_ngram_parts": _whole(1, 65_536),
    # Experts
    "num_experts": _COUNT,
    # 0 is what dense models of a family with experts say.
    "num_local_experts": _SOME,
    "n_routed_experts": _COUNT,
    "moe_num_experts": _COUNT,
    "num_experts_per_tok": _SOME,
    "moe_k": _COUNT,
    "moe_topk": _COUNT,
    "top_k_experts": _COUNT,
    "num_shared_experts": _SOME,
    "n_shared_experts": _SOME,
    "moe_num_shared_experts": _SOME,
    "zero_expert_num": _SOME,
    "n_group": _COUNT,
    "topk_group": _COUNT,
    "routed_scaling_factor": _SCALE,
    "moe_routed_scaling_factor": _SCALE,
    "moe_router_scaling_factor": _SCALE,
    "router_scaling_factor": _SCALE,
    "route_scale": _SCALE,
    "topk_method": Choice(("greedy", "group_limited_greedy", "noaux_tc")),
    "moe_norm_min": NumberField(1e-20, 1),
    "moe_router_logit_softcapping": NumberField(0, 1e6),
    "norm_topk_prob": _FLAG,
    "enable_moe_block": _FLAG,
    "enable_moe_fp32_combine": _FLAG,
    "moe_apply_router_weight_on_input": Choice((False,)),
    "expert_selection_fn": Choice(("softmax", "sigmoid")),
    "shared_expert_combination_strategy": Choice(("average", "sum")),
    # Which layers have them, slide, are rotated
    "decoder_sparse_step": _LAYERS,
    "first_k_dense_replace": _LAYER,
    "num_dense_layers": _LAYER,
    "moe_layer_start_index": _LAYER,
    "moe_layer_end_index": _whole(-1, 512),
    "moe_layer_interval": _LAYERS,
    "interleave_moe_layer_step": _LAYERS,
    "num_nextn_predict_layers": _whole(0, 16),
    "num_kv_shared_layers": _LAYER,
    # 0 is what transformers writes where no layer slides.
    "sliding_window": _whole(0, 1 << 28),
    "sliding_window_pattern": _LAYERS,
    "prefix_dense_sliding_window_pattern": _LAYERS,
    "global_attn_every_n_layers": _LAYERS,
    "max_window_layers": _LAYER,
    "attention_chunk_size": _LENGTH,
    "no_rope_layer_interval": _LAYERS,
    "full_attention_interval": _LAYERS,
    "layer_group_size": _LAYERS,
    "num_mem_blocks": _LAYERS,
    "adapter_rank": _WIDTH,
    "attn_layer_period": _LAYERS,
    "attn_layer_offset": _LAYER,
    "expert_layer_period": _LAYERS,
    "expert_layer_offset": _LAYER,
    # Recurrent layers
    "linear_conv_kernel_dim": _TAPS,
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "linear_key_head_dim": _HEAD_DIM,
    "linear_value_head_dim": _HEAD_DIM,
    "linear_allow_neg_eigval": _FLAG,
    "linear_head_dim": _HEAD_DIM,
    "linear_num_heads": _HEADS,
    "short_conv_kernel_size": _TAPS,
    "kda_safe_gate": _FLAG,
    "kda_lower_bound": NumberField(-100, 0),
    "block_size": _LENGTH,
    "mamba_d_conv": _TAPS,
    "mamba_d_ssm": _WIDTH,
    "mamba_d_state": _STATE,
    "mamba_expand": _whole(1, 64),
    "mamba_n_groups": _HEADS,
    "mamba_n_heads": _HEADS,
    "mamba_num_heads": _HEADS,
    "n_mamba_heads": _HEADS,
    "mamba_ngroups": _HEADS,
    "mamba_head_dim": _HEAD_DIM,
    "mamba_dt_rank": AutoOr(_WIDTH),
    "mamba_chunk_size": _LENGTH,
    "mamba_hidden_act": _ACTIVATION,
    "mamba_conv_bias": _FLAG,
    "mamba_proj_bias": _FLAG,
    "mamba_norm_before_gate": _FLAG,
    "mamba_rms_norm": _FLAG,
    "chunk_size": _LENGTH,
    "conv_kernel": _TAPS,
    "conv_L_cache": _TAPS,
    "conv_bias": _FLAG,
    "n_groups": _HEADS,
    "ssm_state_size": _STATE,
    "time_step_min": NumberField(0, 1),
    "use_conv_bias": _FLAG,
    # Tokens
    "bos_token_id": _TOKEN,
    "pad_token_id": _TOKEN,
    "eod_token_id": _TOKEN,
    "sep_token_id": _TOKEN,
    # Arithmetic
    "query_pre_attn_scalar": _whole(1, 1 << 20),
    "rms_norm_eps": _EPSILON,
    "layer_norm_eps": _EPSILON,
    "layer_norm_epsilon": _EPSILON,
    "norm_eps": _EPSILON,
    "norm_epsilon": _EPSILON,
    "rope_theta": NumberField(2, 1e12),
    "rope_local_base_freq": NumberField(2, 1e12),
    "partial_rotary_factor": NumberField(0.01, 1),
    "embedding_multiplier": _SCALE,
    "residual_multiplier": _SCALE,
    "attention_multiplier": _SCALE,
    "attention_value_scale": _SCALE,
    "logits_scaling": _SCALE,
    "logit_scale": _SCALE,
    "attn_scale": _SCALE,
    "attention_in_multiplier": _SCALE,
    "attention_out_multiplier": _SCALE,
    "key_multiplier": _SCALE,
    "lm_head_multiplier": _SCALE,
    "ssm_in_multiplier": _SCALE,
    "ssm_out_multiplier": _SCALE,
    "block_ffn_dim_multiplier": _SCALE,
    "mlp_hidden_act": _ACTIVATION,
    "floor_scale": _LENGTH,
    "full_attn_alpha_factor": _SCALE,
    "full_attn_beta_factor": _SCALE,
    "linear_attn_alpha_factor": _SCALE,
    "linear_attn_beta_factor": _SCALE,
    "mlp_alpha_factor": _SCALE,
    "mlp_beta_factor": _SCALE,
    "scale_emb": _SCALE,
    "scale_depth": _SCALE,
    "dim_model_base": _WIDTH,
    "final_logit_softcapping": _SCALE,
    "attn_logit_softcapping": _SCALE,
    "output_multiplier": _SCALE,
    "post_norm_eps": _EPSILON,
    "qk_scale_factor": _SCALE,
    "residual_gate_temperature": _SCALE,
    "clip_qkv": _SCALE,
    "swiglu_alpha": _SCALE,
    "swiglu_limit": _SCALE,
    "hidden_act": _ACTIVATION,
    "output_gate_type": Choice(("sigmoid", "silu", None)),
    "hidden_activation": _ACTIVATION,
    # Which parts there are
    "attention_bias": _FLAG,
    "block_auto_adjust_ff_dim": _FLAG,
    "projectors_bias": _FLAG,
    "position_embedding_type": Choice(("rope", "nope")),
    "use_expert_bias": _FLAG,
    "attention_out_bias": _FLAG,
    "attention_k_eq_v": _FLAG,
    "attn_temperature_tuning": _FLAG,
    "gating": Choice((True, False, "per-head")),
    "lm_head_bias": _FLAG,
    "mlp_bias": _FLAG,
    "mup_enabled": _FLAG,
    "qk_layernorm": _FLAG,
    "rope_interleave": _FLAG,
    "qkv_bias": _FLAG,
    "tie_word_embeddings": _FLAG,
    "use_attention_gate": _FLAG,
    "use_bias": _FLAG,
    "use_double_wide_mlp": _FLAG,
    "use_dsa": _FLAG,
    "use_parallel_residual": _FLAG,
    "use_post_norm": _FLAG,
    "use_qk_norm": _FLAG,
    "use_qkv_bias": _FLAG,
    "add_bias_linear": _FLAG,
    "use_long_context": _FLAG,
    "use_mem_rope": _FLAG,
    "use_shared_attention_adapter": _FLAG,
    "use_sandwich_norm": _FLAG,
    "use_sliding_window": _FLAG,
    # Attention is causal here, as it is for text where only pictures are seen in both directions.
    "use_bidirectional_attention": Choice((False, "vision")),
}
_KINDS = (
    "full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "minimax_m3_sparse",
    "linear_attention", "conv", "moe", "mlp", "hybrid",
    # As older files write them.
    "attention", "mamba",
)  # fmt: skip
LISTS: dict[str, Rule] = {
    # Two numbers where experts for pictures have another width.
    "moe_intermediate_size": _WIDTH,
    "layer_types": Choice(_KINDS),
    "layers_block_type": Choice(_KINDS),
    "indexer_types": Choice(("full", "shared")),
    "ple_layer_ids": _LAYERS,
    "attn_layer_indices": _whole(0, 511),
    "full_attn_idxs": _whole(0, 511),
    "mlp_multipliers": _SCALE,
    "ssm_multipliers": _SCALE,
    "mlp_layer_types": Choice(("dense", "sparse")),
    "mlp_only_layers": _whole(0, 511),
    "moe_layers": _whole(0, 511),
    "no_rope_layers": _whole(0, 1),
    "num_attention_heads_per_layer": _HEADS,
    "eos_token_id": _TOKEN,
    # 0: a layer without rotary positions.
    # 0 and null: no bound.
    "swiglu_limits": OrNull(NumberField(0, 1e6)),
    "swiglu_limits_shared": OrNull(NumberField(0, 1e6)),
    "layer_rope_theta": NumberField(0, 1e12),
}
# A layer's own settings, by its index.
NESTED: dict[str, dict[str, Rule]] = {
    "per_layer_config": {
        "head_dim": _HEAD_DIM,
        "num_key_value_heads": _HEADS,
        "num_attention_heads": _HEADS,
        "kv_lora_rank": _whole(2, 8_192),
        "q_lora_rank": _WIDTH,
        "qk_nope_head_dim": _HEAD_DIM,
        "qk_rope_head_dim": _HEAD_DIM,
        "v_head_dim": _HEAD_DIM,
    },
}
# Where null means something else than the default.
_NULLABLE = {
    "num_key_value_heads", "head_dim", "sliding_window", "final_logit_softcapping", "attn_logit_softcapping",
    "clip_qkv", "bos_token_id", "pad_token_id", "eos_token_id", "layer_types", "mlp_only_layers",
    "use_bidirectional_attention", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "mlp_layer_types",
    "moe_layers", "no_rope_layers", "num_attention_heads_per_layer", "num_global_key_value_heads", "rotary_dim",
    "attention_chunk_size", "routed_scaling_factor", "attention_value_scale", "prefix_dense_intermediate_size",
    "num_experts", "top_k_experts", "moe_intermediate_size", "eod_token_id", "sep_token_id", "rms_norm_eps",
    "dim_model_base", "n_group", "q_lora_rank", "qk_head_dim", "scale_depth", "topk_group",
    "v_head_dim", "zero_expert_num", "attn_layer_indices", "full_attn_idxs", "mlp_multipliers", "ssm_multipliers",
    "mamba_d_ssm", "moe_latent_size", "position_embedding_type", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim",
    "indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio",
    "ple_embed_dim", "ple_layer_ids", "logit_scale", "num_sliding_attention_heads", "swiglu_limits",
    "swiglu_limits_shared", "layer_rope_theta", "post_norm_eps",
    "num_nextn_predict_layers", "n_shared_experts", "n_routed_experts", "max_window_layers", "sliding_window_pattern",
}  # fmt: skip
_MAX_ITEMS = 512


def checked_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with fractions as floats; raises UnsupportedModel at the first field that is out of its range.

    Files write a fraction like 6.0 as 6, which transformers' classes refuse.
    """
    _check(values)
    return {name: float(value) if _is_fraction(name, value) else value for name, value in values.items()}


def _is_fraction(name: str, value: object) -> bool:
    rule = FIELDS.get(name)
    return isinstance(rule, NumberField) and not rule.whole and value is not None


def _check(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is None and name in _NULLABLE:
            continue
        if name in FIELDS and not FIELDS[name].admits(value):
            raise out_of_range(name, value, FIELDS[name])
        if name in LISTS and not _are_all(value, item := LISTS[name]):
            raise out_of_range(name, value, f"a list of at most {_MAX_ITEMS} times {item}")
        if name in NESTED:
            _check_layers(name, value)


def _check_layers(name: str, value: object) -> None:
    if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
        raise out_of_range(name, value, f"an object of at most {_MAX_ITEMS} layers")
    for index, settings in value.items():
        if not (index.isascii() and index.isdecimal() and len(index) <= 4 and isinstance(settings, dict)):
            raise out_of_range(f"{name}.{described(index)}", settings, "an object, under the index of a layer")
        for key, number in settings.items():
            rule = NESTED[name].get(key)
            if rule is None or not rule.admits(number):
                raise out_of_range(f"{name}.{described(key)}", number, rule or f"one of {', '.join(NESTED[name])}")


def out_of_range(name: str, value: object, wanted: object) -> UnsupportedModel:
    """The error for a value in config.json under `name`, with the expected values."""
    return UnsupportedModel(f"config.json: {name} is {described(value)}, wanted {wanted}")


def _are_all(value: object, item: Rule) -> bool:
    items = value if isinstance(value, list) else [value]
    return len(items) <= _MAX_ITEMS and all(map(item.admits, items))


ROPE_FIELDS = ("rope_parameters", "rope_scaling")
_FACTOR = NumberField(1, 1e6)
_SECTION = _whole(1, 512)
_NUMBERS: dict[str, NumberField] = {
    "rope_theta": NumberField(2, 1e12),
    "factor": _FACTOR,
    "original_max_position_embeddings": NumberField(1, 1 << 28, whole=True),
    "low_freq_factor": NumberField(1e-3, 1e6),
    "high_freq_factor": NumberField(1e-3, 1e6),
    "beta_fast": NumberField(1e-3, 1e6),
    "beta_slow": NumberField(1e-3, 1e6),
    "attention_factor": NumberField(1e-3, 1e3),
    "mscale": NumberField(1e-3, 1e3),
    "mscale_all_dim": NumberField(1e-3, 1e3),
    "partial_rotary_factor": NumberField(0.01, 1),
    "max_position_embeddings": NumberField(1, 1 << 28, whole=True),
    "llama_4_scaling_beta": NumberField(0, 1e3),
}
# `dynamic` and `longrope` turn with the longest sequence of a pass: a row's answer would depend on its neighbours.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "proportional": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Names of scalings, and which part of a head turns with which axis of a picture: for text they are all the same.
_OTHERS = {"rope_type", "type", "truncate", "mrope_section", "mrope_interleaved"}
LAYER_KINDS = {"full_attention", "indexed_attention", "sliding_attention"}


def check_rope(values: Mapping[str, Any], by_layer_kind: bool, partial: bool) -> None:
    """Raises UnsupportedModel.

    `by_layer_kind` says that the family has one set of parameters per kind of layer, `partial` that its heads may be
    rotated in part.
    """
    given = {name: values[name] for name in ROPE_FIELDS if values.get(name) is not None}
    for name, rope in given.items():
        if not isinstance(rope, dict):
            raise out_of_range(name, rope, "an object")
        if by_layer_kind and rope.keys() & LAYER_KINDS:
            if rope.keys() > LAYER_KINDS:
                raise out_of_range(name, sorted(rope), f"at most {sorted(LAYER_KINDS)}")
            for kind, part in rope.items():
                if part is not None:
                    _check_scaling(part, f"{name}.{kind}", partial)
        else:
            _check_scaling(rope, name, partial)
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise UnsupportedModel("config.json: rope_scaling and rope_parameters differ, wanted one of them")


def _check_scaling(rope: object, where: str, partial: bool) -> None:
    if not isinstance(rope, dict):
        raise out_of_range(where, rope, "an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise out_of_range(f"{where}.rope_type", kind, f"one of {', '.join(_NEEDED)}")
    for name in _NEEDED[kind]:
        if rope.get(name) is None:
            raise out_of_range(f"{where}.{name}", None, f"a number, because rope_type is {kind}")
    for name, value in rope.items():
        if name in _NUMBERS and value is not None and not _NUMBERS[name].admits(value):
            raise out_of_range(f"{where}.{name}", value, _NUMBERS[name])
        if name not in _NUMBERS and name not in _OTHERS:
            raise out_of_range(f"{where}.{described(name)}", value, f"no other field than {', '.join(_NUMBERS)}")
    if not partial and rope.get("partial_rotary_factor") not in (None, 1):
        raise out_of_range(f"{where}.partial_rotary_factor", rope["partial_rotary_factor"], "1 in this family")
    if not _are_all(rope.get("mrope_section", []), _SECTION):
        raise out_of_range(f"{where}.mrope_section", rope["mrope_section"], f"a list of times {_SECTION}")
    if not isinstance(rope.get("mrope_interleaved", True), bool):
        raise out_of_range(f"{where}.mrope_interleaved", rope["mrope_interleaved"], "true or false")
    if not isinstance(rope.get("truncate", True), bool):
        raise out_of_range(f"{where}.truncate", rope["truncate"], "true or false")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise out_of_range(f"{where}.low_freq_factor", rope["low_freq_factor"], "less than high_freq_factor")
