"""Tiny random checkpoints of every supported family; tests/matrix/families.py runs them all."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

# Sizes by every name that families give them; those that a family's config does not know are left out. Windows are
# shorter than the prompts, layers enough to stream, and more experts than a token uses.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 384, "max_position_embeddings": 512, "eos_token_id": 2,
    "bos_token_id": None, "pad_token_id": None, "sliding_window": 16, "moe_intermediate_size": 64,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "shared_expert_intermediate_size": 64, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 48, "q_lora_rank": 40, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 20,
}  # fmt: skip
# Recurrent layers: more value heads than key heads, values longer than keys, a scan's chunk shorter than a prompt.
GATED_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 32}
# Fewer tokens than most prompts have, and heads enough for scores to differ: zeros would be equal.
INDEXER = {"index_topk": 24, "index_head_dim": 32, "index_n_heads": 8}
# Three blocks of seven tokens: as many tokens, or fewer, than half of the prompts have.
BLOCKS = {
    "index_block_size": 7, "index_topk_blocks": 3, "index_local_blocks": 1, "index_head_dim": 24, "index_n_heads": 2,
}  # fmt: skip
# Positions of pictures have three axes, between which the elements of a head are divided.
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
SHORT_MROPE = MROPE | {"mrope_section": [2, 3, 3]}
MROPE_LAST = MROPE | {"mrope_section": [3, 3, 2]}
HALF_MROPE = MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
# What makes a family's features occur. None takes a size away, so that the family's own default holds.
SETTINGS: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_shared_experts": 1},
    "axk1": {"num_key_value_heads": 4},
    "axk2": {"num_key_value_heads": 4, "gated_norm_rank": 8, **INDEXER},
    "bailing_hybrid": {"num_key_value_heads": 4, "layer_group_size": 2, "n_group": 4, "topk_group": 2},
    "bamba": {"attn_layer_indices": [1, 3], "pad_token_id": 0, **MAMBA2},
    "bitnet": {"hidden_act": "relu2"},
    "cohere": {"use_qk_norm": True, "logit_scale": 2.0},
    "cohere2": {"logit_scale": 2.0},
    "cohere2_moe": {"num_shared_experts": 1, "logit_scale": 2.0, "prefix_dense_intermediate_size": 64},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2, "logit_scale": 2.0,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), SHORT_MROPE),
    },
    "cwm": {"bos_token_id": 1},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_key_value_heads": 2},
    "deepseek_v2": {"num_key_value_heads": 4, "q_lora_rank": None},
    "deepseek_v3": {"num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {"num_key_value_heads": 4, "n_group": 4, "topk_group": 2, **INDEXER},
    "dots1": {"n_shared_experts": 1, "max_window_layers": 2},
    "dots3_note_text": {
        "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "shared_experts_intermediate_size": 64,
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 40, "swa_kv_lora_rank": 32,
        "swa_head_dim": 40, "swa_qk_nope_head_dim": 24, "swa_qk_rope_head_dim": 16, "swa_v_head_dim": 20,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
        "head_dim": 40, **INDEXER,
    },
    "ernie4_5_moe": {"moe_num_shared_experts": 1, "moe_layer_end_index": 3, "use_bias": True},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [64, 32], "moe_num_shared_experts": 1, "use_bias": True, "rope_parameters": MROPE_LAST,
        "tie_word_embeddings": False,
    },
    "exaone4": {"sliding_window_pattern": 2},
    "exaone_moe": {"sliding_window_pattern": 2},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_groups": 2, "pad_token_id": 0, "mlp_multipliers": [0.5, 0.8], "key_multiplier": 0.7,
        "ssm_multipliers": [0.4, 0.5, 0.6, 0.7, 0.8], "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, **MAMBA2,
    },
    "glm_moe_dsa": {"num_key_value_heads": 4, "indexer_types": ["full", "shared"] * 2, **INDEXER},
    "gemma": {"pad_token_id": 0},
    "gemma2": {"query_pre_attn_scalar": 32, "pad_token_id": 0, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"num_hidden_layers": 7, "query_pre_attn_scalar": 32, "pad_token_id": 0},
    "gemma4_text": {
        "num_hidden_layers": 7, "global_head_dim": 64, "enable_moe_block": True, "top_k_experts": 2,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 384, "num_kv_shared_layers": 0,
        "pad_token_id": 0, "final_logit_softcapping": 20.0,
    },
    "gemma4_unified_text": {"num_hidden_layers": 7, "global_head_dim": 64, "pad_token_id": 0},
    "glm": {"pad_token_id": 0},
    "glm4": {"pad_token_id": 0},
    "glm4_moe_lite": {"num_key_value_heads": 4, "v_head_dim": 48},
    "glm4v_moe_text": {"rope_parameters": HALF_MROPE},
    "glm4v_text": {"pad_token_id": 0, "rope_parameters": HALF_MROPE},
    "glm_ocr_text": {"pad_token_id": 0, "rope_parameters": SHORT_MROPE},
    "granite": {
        "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.2,
    },
    "granite4_vision_text": {
        "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.2,
    },
    "granite_docling_text": {"pad_token_id": 0, "tie_word_embeddings": False},
    "granitemoe": {
        "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.2,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "shared_intermediate_size": 64, "logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2, "position_embedding_type": "nope", **MAMBA2,
    },
    "granitemoeshared": {"shared_intermediate_size": 64},
    "helium": {"head_dim": 16},
    "hunyuan_v1_moe": {"eod_token_id": 3},
    "hyperclovax": {"attention_multiplier": 0.2},
    "hy_v3": {"num_shared_experts": 1},
    "jamba": {
        "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 8, "pad_token_id": 0,
    },
    "kimi_linear": {
        "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16, "q_lora_rank": None,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    },
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"] * 2, "num_attention_heads_per_layer": [4, 6, 4, 6],
        "num_attention_heads": 4,
    },
    "lara_mini": {
        "layer_types": ["linear_attention", "sliding_attention", "full_attention", "linear_attention"],
        "tie_word_embeddings": False, **GATED_DELTA,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "pad_token_id": 0, "tie_word_embeddings": False},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1, "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
    "lfm3": {
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
    "llama4_text": {
        "attention_chunk_size": 16, "no_rope_layer_interval": 2, "floor_scale": 8, "attn_scale": 0.5,
        "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64,
    },
    "longcat_flash": {
        "num_key_value_heads": 4, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 64,
        "zero_expert_num": 4, "head_dim": 16,
    },
    "mellum": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "mimo_v2_flash": {"num_key_value_heads": 1, "v_head_dim": 16},
    "minicpm3": {"num_key_value_heads": 4, "scale_depth": 1.4, "dim_model_base": 32},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "dense_intermediate_size": 96,
        "shared_intermediate_size": 48, "rotary_dim": 16, "swiglu_limit": 0.6, **BLOCKS,
    },
    "minimax": {
        "layer_types": ["full_attention", "linear_attention"] * 2, "block_size": 32, "full_attn_alpha_factor": 1.5,
        "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.2,
    },
    "mistral4": {"num_key_value_heads": 4},
    "muse_spark_text": {"moe_hidden_size": 48},
    "nemotron": {"head_dim": 32},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32,
        "moe_shared_expert_intermediate_size": 64, "pad_token_id": 0, "time_step_min": 0.01,
    },
    "olmo_hybrid": {"num_key_value_heads": 4, "pad_token_id": 0},
    "olmoe": {"num_key_value_heads": 4, "clip_qkv": 2.0},
    "paddleocr_vl_text": {"pad_token_id": 0, "rope_parameters": MROPE},
    "phi": {"qk_layernorm": True},
    "phi3": {"pad_token_id": 0},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_5_omni_text": {"use_sliding_window": True, "max_window_layers": 2, "rope_parameters": SHORT_MROPE},
    "qwen2_5_vl_text": {"use_sliding_window": True, "max_window_layers": 2, "rope_parameters": SHORT_MROPE},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen2_vl_text": {"use_sliding_window": True, "max_window_layers": 2, "rope_parameters": SHORT_MROPE},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_5_moe_text": GATED_DELTA,
    "qwen3_5_text": GATED_DELTA,
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": GATED_DELTA,
    "qwen3_omni_moe_text": {"sliding_window": None, "norm_topk_prob": True, "rope_parameters": MROPE},
    "qwen3_vl_moe_text": {"rope_parameters": MROPE},
    "qwen3_vl_text": {"rope_parameters": MROPE},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"], "hc_count": 3,
        "hc_lowrank": 20, "ple_layer_ids": [1, 3], "ple_embed_dim": 60, "ngram_size": 3, "heads_per_ngram": 5,
        "ngram_vocab_size_base": 211, "make_ngram_vocab_size_divisible_by": 7, "split_ngram_parts": 7,
        "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 24, "indexer_budget": 24,
        "indexer_compress_ratio": 4, "rope_parameters": SHORT_MROPE | {"partial_rotary_factor": 0.5}, **GATED_DELTA,
    },
    "sarvam_mla": {"num_key_value_heads": 4, "n_group": 4, "topk_group": 2},
    "smollm3": {"use_sliding_window": True, "no_rope_layer_interval": 2, "pad_token_id": 0},
    "step3p5": {
        "pad_token_id": 0, "layer_types": ["full_attention", "sliding_attention"] * 2, "share_expert_dim": 64,
        "num_sliding_attention_heads": 6, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "swiglu_limits": [None, None, 0.4, None], "swiglu_limits_shared": [None, None, 0.5, 0],
    },
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "num_key_value_heads": 2},
    "youtu": {"num_key_value_heads": 4},
    # Two blocks, of which one has three uses and the other two, in no order; adapters in attention, too.
    "zamba2": {
        "hidden_size": 40, "num_hidden_layers": 7, "num_mem_blocks": 2, "adapter_rank": 6,
        "use_shared_attention_adapter": True,
        "layers_block_type": [
            "linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid", "hybrid",
        ],
        "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 16, "chunk_size": 32, "use_mem_rope": True,
        "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0, "time_step_min": 0.01,
        "tie_word_embeddings": True,
    },
}  # fmt: skip

# One family for each thing that the seams meet; tests that cost more than a moment run these.
FEATURES = (
    "deepseek_v32",  # an indexer that chooses tokens, with keys of its own
    "deepseek_v3",  # latents instead of keys and values, a matrix that is never quantized
    "gemma2",  # bounded scores
    "gemma3_text",  # windows in five of six layers, rotary settings by kind of layer
    "gemma4_text",  # heads of other sizes in some layers, an input of its own for every layer
    "gpt_oss",  # sinks, transposed experts with biases, activations by pairs
    "granitemoe",  # experts stacked in the file, a tied head, multipliers
    "kimi_linear",  # recurrent layers beside latents, under the name of attention
    "laguna",  # another number of heads by layer, a gate on attention, renamed matrices
    "llama",  # nothing of all that
    "llama4_text",  # chunks, experts outside the interface, queries scaled by position
    "longcat_flash",  # two attentions in a layer, experts that return their input
    "mimo_v2_flash",  # values shorter than keys, more KV heads in sliding layers
    "minimax",  # recurrent layers without a convolution, a window in layers that are called full
    "minimax_m3_vl_text",  # an indexer that chooses blocks for each head, matrices that files have in parts
    "minimax_m2",  # routers with corrections that are buffers
    "mixtral",  # a window in every layer, renamed blocks
    "nemotron_h",  # layers of one part each: Mamba-2, attention, experts or a network; other names outside of layers
    "phimoe",  # a window that only the mask tells
    "qwen3_moe",  # experts apart in the file
    "qwen3_next",  # recurrent layers beside attention
    "zamba2",  # blocks that layers share, with adapters for each use
    "stablelm",  # layers that do not hand on what the model's call gives them
)


def tiny_config(family: str, **sizes: Any) -> Any:
    """The configuration of a family's tiny checkpoint, an instance of transformers' class; `sizes` replace SIZES.

    Those that are not among SIZES replace SETTINGS.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    known = {field.name for field in dataclasses.fields(config_class)}
    own = {name: value for name, value in sizes.items() if name in known and name not in SIZES}
    sizes = {name: value for name, value in {**SIZES, **sizes}.items() if name in known}
    return config_class(**{**sizes, **SETTINGS.get(family, {}), **own})


def stored_numel(model: Any) -> int:
    """Elements of a model's checkpoint: parameters, tied ones once, and buffers that are kept.

    Without what no pass multiplies with: first matrices of experts that return their input, decays of lightning
    attention, and numbers that hash n-grams.
    """
    idle = [one for one in model.modules() if hasattr(one, "zero_expert_num") and hasattr(one, "down_proj")]
    unused = sum(one.gate_up_proj[one.num_routed_experts :].numel() for one in idle)
    kept = model.state_dict().keys()
    named = {**dict(model.named_parameters()), **{name: one for name, one in model.named_buffers() if name in kept}}
    parts = (".slope_rate", "_decay", ".layer_multipliers", ".ngram_heads_")
    return sum(one.numel() for name, one in named.items() if not any(part in name for part in parts)) - unused


# Where attention to few tokens would make float32 and float64 differ after some layers: it has no residual stream.
_SPREADS = {"zamba2": 0.15}


def build_model(family: str, **sizes: Any) -> Any:
    """A stock transformers model with random weights, as spread out as a trained one: greedy tokens vary.

    `sizes` take the place of those in SIZES.
    """
    from moedge.runtime.model.text_class import text_class

    config = tiny_config(family, **sizes)
    torch.manual_seed(sum(map(ord, family)))
    model = text_class(type(config))(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = _SPREADS.get(family, 0.3) if parameter.dim() > 1 else 0.1
            if "bias" in name or "sinks" in name or parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * spread)
        for name, buffer in model.named_buffers():
            # Corrections of routers, which decide between experts.
            if "bias" in name and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) * 0.1)
        if getattr(config, "tie_word_embeddings", False):
            # A tied head otherwise repeats the last token for ever.
            model.get_input_embeddings().weight.mul_(0.1)
    return model


def build_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer whose every id decodes, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    while len(vocab) < vocab_size:
        vocab[f"Ġ{len(vocab)}"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)


def save_tiny(family: str, folder: Path, **sizes: Any) -> Any:
    """Writes the tiny random checkpoint of a family, its tokenizer beside it; returns the stock model."""
    model = build_model(family, **sizes)
    model.save_pretrained(folder)
    build_tokenizer(folder, model.config.get_text_config().vocab_size)
    return model
