"""How the files of each architecture say what a config.json would. Torch-free.

Which kind a layer is, which biases there are and how long some rows are, tensors show. What no key says is as published
for the architecture, or as llama.cpp computes it (`load_arch_hparams` of its src/models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...offload.checkpoint.header import described
from ..settings.errors import UnsupportedModel
from .gguf_metadata import FREQUENCIES, File, Values, floats

Fields = Mapping[str, str | Callable[[File], Any]]
# llama.cpp's number of the function that scores experts.
_SIGMOID = 2


@dataclass(frozen=True, slots=True)
class Architecture:
    """How files of an architecture say what config.json would: by field the key, or what reads the file.

    `published` is what all published models of it have and no key says. Of `partial` heads a part may be rotated;
    the family knows itself what is rotated where it is None. Where `nulls` are not given, they are null.
    """

    family: str
    fields: Fields = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    own: Callable[[File, Values], Values] | None = None
    partial: bool | None = False
    nulls: tuple[str, ...] = ()


def _has(part: str) -> Callable[[File], bool]:
    """Whether layers have a tensor."""
    return lambda file: any(name.endswith(f".{part}") for name in file.entries)


def _sliding(full_every: int) -> Callable[[File], list[str]]:
    return lambda file: file.sliding(full_every)


def _kinds(kinds: Mapping[str, str], other: str) -> Callable[[File], list[str]]:
    return lambda file: file.kinds(kinds, other)


def _quotient(key: str, divisor: str) -> Callable[[File], int]:
    return lambda file: file.size(key) // max(file.size(divisor), 1)


def _expert_width(file: File) -> int | None:
    """The rows of an expert's matrices; older files have no key for it."""
    width = file.only("expert_feed_forward_length", 0) or file.rows("ffn_up_exps")
    both = file.rows("ffn_gate_up_exps")
    return width or (both // 2 if both else None)


def _moe(count: str = "num_experts", per_token: str = "num_experts_per_tok") -> Fields:
    return {count: "expert_count", per_token: "expert_used_count", "moe_intermediate_size": _expert_width}


_BIASES: Fields = {
    "attention_bias": lambda file: _biased(file, ("attn_q", "attn_k", "attn_v", "attn_output")),
    "mlp_bias": lambda file: _biased(file, ("ffn_gate", "ffn_up", "ffn_down")),
}


def _biased(file: File, parts: tuple[str, ...]) -> bool:
    """Whether matrices have biases. Raises UnsupportedModel where only some of them do."""
    found = [part for part in parts if file.has(f"{part}.bias")]
    if found and len(found) < len(parts):
        raise UnsupportedModel(f"GGUF: of {', '.join(parts)} only {', '.join(found)} have biases; wanted all or none")
    return bool(found)


def _llama(file: File, values: Values) -> Values:
    """Mixtral is a llama with experts here."""
    if not file.get("expert_count"):
        return {}
    return {
        "model_type": "mixtral",
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "attention_bias": None,
        "mlp_bias": None,
    }


def _qwen_moe(file: File, values: Values) -> Values:
    # Absent where all layers have experts, and of no use then.
    return {"intermediate_size": values["intermediate_size"] or values["moe_intermediate_size"]}


def _gpt_oss(file: File, values: Values) -> Values:
    rope = values["rope_parameters"]
    # As published: the file's keys leave these out.
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if rope["rope_type"] == "yarn" else {}
    return {"rope_parameters": {**usual, **rope}}


def _gemma(file: File, values: Values) -> Values:
    # Models of these numbers of layers scale queries by the hidden size (llama.cpp, LLM_TYPE_27B).
    wide = file.size("block_count") == {"gemma2": 46, "gemma3": 62}[file.architecture]
    heads = values["num_attention_heads"]
    return {"query_pre_attn_scalar": values["hidden_size"] // heads if wide and heads else values["head_dim"]}


def _gemma3(file: File, values: Values) -> Values:
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10_000.0)}
    everywhere = {**values["rope_parameters"], "rope_theta": file.get("rope.freq_base", 1_000_000.0)}
    return {**_gemma(file, values), "rope_parameters": {"full_attention": everywhere, "sliding_attention": local}}


def _inputs_by_layer(file: File) -> int | None:
    """The tokens that have an input of their own for each layer."""
    table = file.entries.get("per_layer_token_embd.weight")
    return table.shape[0] if table else None


def _gemma4(file: File, values: Values) -> Values:
    """Layers that look back everywhere have heads of their own, and perhaps no values but their keys."""
    kinds, layers = values["layer_types"], range(len(values["layer_types"]))
    heads = file.get("attention.head_count_kv")
    by_layer = heads if isinstance(heads, list) else [heads] * len(layers)
    full = next((layer for layer in layers if kinds[layer] == "full_attention"), 0)
    slides = next((layer for layer in layers if kinds[layer] != "full_attention"), 0)
    if len(by_layer) < len(layers) or not layers:
        raise UnsupportedModel(f"GGUF: {len(by_layer)} numbers of heads for {len(layers)} layers")
    shares = not file.has("attn_v.weight", full)
    lengths = file.get("feed_forward_length")
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10_000.0)}
    rope = {"rope_type": "proportional", "rope_theta": file.get("rope.freq_base"), "partial_rotary_factor": _ones(file)}
    return {
        "num_key_value_heads": by_layer[slides],
        "attention_k_eq_v": shares,
        "num_global_key_value_heads": by_layer[full] if shares else None,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        # Layers that take keys and values from others have twice as much of it, then.
        "intermediate_size": lengths[0] if isinstance(lengths, list) and lengths else lengths,
        "use_double_wide_mlp": isinstance(lengths, list),
        "enable_moe_block": bool(values["num_experts"]),
    }


def _ones(file: File) -> float:
    """The part of a head's elements that rotate: others have a factor at which they never do."""
    entry = file.entries.get(FREQUENCIES)
    factors = floats(file, entry) if entry else ()
    count = sum(each == 1 for each in factors)
    if not count or any(each != 1 for each in factors[:count]) or any(each < 1e20 for each in factors[count:]):
        raise UnsupportedModel(f"GGUF: {FREQUENCIES} is missing, or not 1 and then about infinite")
    return count / len(factors)


def _latent(file: File, values: Values) -> Values:
    """DeepSeek-V3, and with scores by softmax V2; older files have no keys for heads before their absorption."""
    rope, heads = values["rope_parameters"], values["num_attention_heads"]
    rotated = file.size("rope.dimension_count")
    keys, lengths = file.get("attention.key_length_mla"), ("attention.key_length", "attention.value_length")
    key, value = (file.size(name if keys is None else f"{name}_mla") for name in lengths)
    scale = file.get("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and isinstance(scale, float) and scale:
        # A tenth of it; published models have both of the same size.
        scale = float(f"{10 * scale:.4g}")
        rope = {**rope, "mscale": scale, "mscale_all_dim": scale}
    sigmoid = file.get("expert_gating_func") == _SIGMOID or _has("exp_probs_b.bias")(file)
    choice = "group_limited_greedy" if file.size("expert_group_count", 1) > 1 else "greedy"
    softmax = {} if sigmoid else {"model_type": "deepseek_v2", "topk_method": choice}
    return {
        "num_key_value_heads": heads, "head_dim": None, "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated, "v_head_dim": value, "rope_parameters": rope,
        "norm_topk_prob": bool(values["norm_topk_prob"]), **softmax,
    }  # fmt: skip


def _granite_moe(file: File, values: Values) -> Values:
    return {"model_type": "granitemoeshared"} if values["shared_intermediate_size"] else {}


def _granite_hybrid(file: File, values: Values) -> Values:
    if values["attention_multiplier"] is None:
        raise UnsupportedModel("GGUF: granitehybrid.attention.scale is missing: it is a Bamba, which is not read")
    shared = values["shared_intermediate_size"] or values["intermediate_size"]
    return {
        "shared_intermediate_size": shared,
        "num_local_experts": values["num_local_experts"] or 0,
        "num_experts_per_tok": values["num_experts_per_tok"] or 0,
        "position_embedding_type": "rope" if file.get("rope.scaling.finetuned", True) else "nope",
    }


def _jamba(file: File, values: Values) -> Values:
    attention, experts = _periodic(file, "attn_q.weight"), _periodic(file, "ffn_gate_inp.weight")
    return {
        "attn_layer_period": attention[0], "attn_layer_offset": attention[1], "expert_layer_period": experts[0],
        "expert_layer_offset": experts[1],
    }  # fmt: skip


def _periodic(file: File, part: str) -> tuple[int, int]:
    """The distance of layers that have a tensor, and the first of them."""
    kinds = file.kinds({part: part}, "")
    found = [layer for layer, kind in enumerate(kinds) if kind]
    if not found:
        return len(kinds) + 1, len(kinds)
    period = found[1] - found[0] if len(found) > 1 else max(len(kinds) - found[0], found[0] + 1)
    if found != list(range(found[0], len(kinds), period)) or found[0] >= period:
        raise UnsupportedModel(f"GGUF: layers {described(found)} have {part}, wanted them at one distance")
    return period, found[0]


def _nemotron(file: File, values: Values) -> Values:
    return {
        # The list has the rows of experts where there are some.
        "intermediate_size": file.rows("ffn_up") or file.only("feed_forward_length"),
        "layer_norm_epsilon": values["layer_norm_epsilon"] or values["rms_norm_eps"],
    }


def _olmo(file: File, values: Values) -> Values:
    """Windows came with OLMo 3, which scales positions where there are none."""
    if not values["sliding_window"]:
        return {"layer_types": None, "sliding_window": None}
    rope = values["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", rope["rope_theta"])}
    return {"model_type": "olmo3", "rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _exaone(file: File, values: Values) -> Values:
    """Without windows positions are rotated in all layers."""
    return {} if values["sliding_window"] else {"layer_types": ["full_attention"] * len(values["layer_types"])}


def _phi3(file: File, values: Values) -> Values:
    if "rope_factors_long.weight" in file.entries:
        raise UnsupportedModel("GGUF: rotary positions are scaled by longrope, which is not read")
    return {"sliding_window": values["sliding_window"] or None}


def _llama4(file: File, values: Values) -> Values:
    # Maverick, which has 128, is published without.
    return {"use_qk_norm": values["num_local_experts"] != 128}


def _cohere_moe(file: File, values: Values) -> Values:
    dense = values["first_k_dense_replace"] or 0
    return {
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(len(values["layer_types"]))],
        "expert_selection_fn": "sigmoid" if file.get("expert_gating_func") == _SIGMOID else "softmax",
    }


def _with_experts(file: File) -> list[int]:
    return [layer for layer, kind in enumerate(file.kinds({"ffn_gate_inp.weight": "moe"}, "")) if kind]


def _dense_before(file: File) -> int:
    """How many layers come before the first that has experts."""
    return min(_with_experts(file), default=file.layers)


_WINDOW = {"sliding_window": "attention.sliding_window"}
_LAYER_NORM = "attention.layer_norm_epsilon"
_GROUPED: Fields = {
    **_moe("n_routed_experts"), "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": _dense_before, "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count", "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}  # fmt: skip
_QWEN_DELTA: Fields = {
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
    "linear_value_head_dim": _quotient("ssm.inner_size", "ssm.time_step_rank"),
    "layer_types": _kinds({"ssm_a": "linear_attention"}, "full_attention"),
    "attention_bias": _has("attn_q.bias"),
}  # fmt: skip
_QWEN_MOE: Fields = {
    **_moe(),
    "shared_expert_intermediate_size": lambda file: file.rows("ffn_up_shexp"),
}
_GRANITE: Fields = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale", "attention_bias": _has("attn_q.bias"),
}  # fmt: skip
_GRANITE_EXPERTS: Fields = {
    "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip
_MAMBA: Fields = {
    "mamba_d_conv": "ssm.conv_kernel", "mamba_d_state": "ssm.state_size",
    "mamba_expand": _quotient("ssm.inner_size", "embedding_length"), "mamba_conv_bias": _has("ssm_conv1d.bias"),
    "mamba_proj_bias": _has("ssm_in.bias"),
}  # fmt: skip
_CONVOLUTION: Fields = {
    "norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache",
    "layer_types": _kinds({"shortconv.conv.weight": "conv"}, "full_attention"),
    "conv_bias": _has("shortconv.conv.bias"),
}  # fmt: skip
_NEMOTRON = Architecture(
    "nemotron_h",
    {**_GROUPED, "mamba_num_heads": "ssm.time_step_rank", "ssm_state_size": "ssm.state_size",
     "mamba_head_dim": _quotient("ssm.inner_size", "ssm.time_step_rank"), "n_groups": "ssm.group_count",
     "conv_kernel": "ssm.conv_kernel", "use_conv_bias": _has("ssm_conv1d.bias"), "layer_norm_epsilon": _LAYER_NORM,
     "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length", "moe_latent_size": "moe_latent_size",
     "layers_block_type": _kinds(
         {"ssm_a": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}, "mlp")},
    own=_nemotron, partial=None,
)  # fmt: skip
_LATENTS: Fields = {
    **_GROUPED, "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank",
    "v_head_dim": "attention.value_length_mla",
}  # fmt: skip
# By the name that llama.cpp has for them.
ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture(
        "afmoe",
        {**_moe(), **_WINDOW, "layer_types": _sliding(4), "num_dense_layers": _dense_before,
         "num_shared_experts": "expert_shared_count", "route_scale": "expert_weights_scale"},
        {"mup_enabled": True},
    ),
    "arcee": Architecture("arcee", {**_BIASES, "mlp_bias": lambda file: _biased(file, ("ffn_up", "ffn_down"))}),
    "cohere2": Architecture(
        "cohere2",
        {**_WINDOW, "layer_types": _sliding(4), "logit_scale": "logit_scale", "layer_norm_eps": _LAYER_NORM},
    ),
    "cohere2moe": Architecture(
        "cohere2_moe",
        {**_moe(), **_WINDOW, "layer_types": _sliding(4), "logit_scale": "logit_scale", "layer_norm_eps": _LAYER_NORM,
         "intermediate_size": _expert_width, "prefix_dense_intermediate_size": "feed_forward_length",
         "first_k_dense_replace": _dense_before, "norm_topk_prob": "expert_weights_norm",
         "num_shared_experts": "expert_shared_count"},
        own=_cohere_moe,
    ),
    "command-r": Architecture(
        "cohere",
        {"logit_scale": "logit_scale", "layer_norm_eps": _LAYER_NORM, "use_qk_norm": _has("attn_q_norm.weight")},
    ),
    "deepseek2": Architecture("deepseek_v3", _LATENTS, own=_latent, partial=None, nulls=("q_lora_rank",)),
    "deepseek32": Architecture(
        "deepseek_v32",
        {**_LATENTS, "index_topk": "attention.indexer.top_k", "index_head_dim": "attention.indexer.key_length",
         "index_n_heads": "attention.indexer.head_count"},
        own=_latent, partial=None,
    ),
    # Published without windows.
    "dots1": Architecture("dots1", {**_GROUPED, "layer_types": _kinds({}, "full_attention")}),
    "ernie4_5": Architecture("ernie4_5", {"use_bias": _has("attn_q.bias")}),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {**_moe("moe_num_experts", "moe_k"), "use_bias": _has("attn_q.bias"),
         "moe_layer_interval": "interleave_moe_layer_step", "moe_layer_start_index": _dense_before,
         "moe_layer_end_index": lambda file: max(_with_experts(file), default=-1),
         "moe_num_shared_experts": "expert_shared_count"},
    ),
    "exaone4": Architecture(
        "exaone4", {**_WINDOW, "layer_types": _sliding(4)}, own=_exaone, nulls=("sliding_window",)
    ),
    "exaone-moe": Architecture(
        "exaone_moe",
        {**_GROUPED, **_moe(), **_WINDOW, "layer_types": _sliding(4), "num_shared_experts": "expert_shared_count",
         "n_routed_experts": lambda file: None},
    ),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture(
        "gemma2",
        {**_WINDOW, "attn_logit_softcapping": "attn_logit_softcapping",
         "final_logit_softcapping": "final_logit_softcapping"},
        own=_gemma,
    ),
    "gemma3": Architecture("gemma3_text", _WINDOW, own=_gemma3),
    "gemma4": Architecture(
        "gemma4_text",
        {**_moe(per_token="top_k_experts"), **_WINDOW, "layer_types": _sliding(6),
         "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length_swa",
         "global_head_dim": "attention.key_length",
         "num_kv_shared_layers": "attention.shared_kv_layers", "final_logit_softcapping": "final_logit_softcapping",
         "hidden_size_per_layer_input": "embedding_length_per_layer_input",
         "vocab_size_per_layer_input": _inputs_by_layer},
        own=_gemma4, partial=None, nulls=("final_logit_softcapping",),
    ),
    "glm4": Architecture("glm4", {"attention_bias": _has("attn_q.bias")}, partial=True),
    "glm4moe": Architecture(
        "glm4_moe", {**_GROUPED, "use_qk_norm": _has("attn_q_norm.weight"), "attention_bias": _has("attn_q.bias")},
        partial=True,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {**_WINDOW, "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
         "intermediate_size": _expert_width},
        own=_gpt_oss,
    ),
    "granite": Architecture("granite", {**_BIASES, **_GRANITE}),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {**_GRANITE, **_GRANITE_EXPERTS, **_MAMBA, "mamba_n_groups": "ssm.group_count",
         "mamba_n_heads": "ssm.time_step_rank", "layer_types": _kinds({"ssm_a": "linear_attention"}, "full_attention")},
        own=_granite_hybrid,
    ),
    "granitemoe": Architecture("granitemoe", {**_GRANITE, **_GRANITE_EXPERTS}, own=_granite_moe),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", {"attention_bias": _has("attn_q.bias")}),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        {"num_experts": "expert_count", "moe_topk": "expert_used_count", "attention_bias": _has("attn_q.bias")},
    ),
    "jamba": Architecture(
        "jamba",
        {**_MAMBA, "mamba_dt_rank": "ssm.time_step_rank", "num_experts": "expert_count",
         "num_experts_per_tok": "expert_used_count"},
        own=_jamba, partial=None,
    ),
    "lfm2": Architecture("lfm2", _CONVOLUTION, {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**_moe(), **_CONVOLUTION, "num_dense_layers": _dense_before,
         "use_expert_bias": _has("exp_probs_b.bias")},
        {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
    ),
    "llama": Architecture("llama", _BIASES, own=_llama),
    "llama4": Architecture(
        "llama4_text",
        {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
         "intermediate_size": _expert_width, "intermediate_size_mlp": "feed_forward_length",
         "interleave_moe_layer_step": "interleave_moe_layer_step"},
        {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True,
         "no_rope_layer_interval": 4},
        own=_llama4,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
         "intermediate_size": _expert_width, "rotary_dim": "rope.dimension_count"},
        partial=None,
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "olmo2": Architecture("olmo2", {**_WINDOW, "layer_types": _sliding(4)}, own=_olmo),
    # Published without bounds of queries, keys and values.
    "olmoe": Architecture("olmoe", _moe(), {"norm_topk_prob": False}),
    "phi3": Architecture(
        "phi3", {**_WINDOW, "original_max_position_embeddings": "rope.scaling.original_context_length"}, own=_phi3,
        partial=True,
    ),
    "qwen2": Architecture("qwen2"),
    # Qwen3 divides the scores of chosen experts by their sum, Qwen2 does not; no key says it.
    "qwen2moe": Architecture("qwen2_moe", _QWEN_MOE, {"norm_topk_prob": False}, own=_qwen_moe),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture("qwen3_5_text", _QWEN_DELTA, partial=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", {**_QWEN_MOE, **_QWEN_DELTA}, partial=True),
    "qwen3moe": Architecture("qwen3_moe", _moe(), {"norm_topk_prob": True}, own=_qwen_moe),
    "qwen3next": Architecture(
        "qwen3_next", {**_QWEN_MOE, **_QWEN_DELTA}, {"norm_topk_prob": True}, own=_qwen_moe, partial=True
    ),
    "seed_oss": Architecture(
        "seed_oss", {"attention_bias": _has("attn_q.bias"), "attention_out_bias": _has("attn_output.bias")}
    ),
    "smollm3": Architecture("smollm3", {"attention_bias": _has("attn_q.bias")}, {"no_rope_layer_interval": 4}),
    # Windows are published, and llama.cpp has none.
    "starcoder2": Architecture(
        "starcoder2", {"norm_epsilon": _LAYER_NORM, "use_bias": _has("attn_q.bias")}, {"sliding_window": 4096}
    ),
}  # fmt: skip
