"""The model families that moedge runs, those that it refuses, and the text model inside those that see or hear.

Defaults of config fields come from `defaults.json`, which `make tables` generates from transformers.
docs/tables/models.md, which `make matrix` generates, says what ran with which release of transformers. Models that see
or hear (transformers' `*ForConditionalGeneration`) have the text model's own configuration in `text_config`, and its
tensors under a prefix. Other tensors are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from ..settings.errors import UnsupportedModel, require_transformers
from .quantization import KEYS

MOE = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2_text", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "dots1", "dots3_note_text", "ernie4_5_moe", "ernie4_5_vl_moe_text", "exaone_moe",
    "flex_olmo", "flint", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jamba",
    "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "llama4_text", "longcat_flash", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mistral4", "mixtral", "muse_spark_text",
    "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text",
    "qwen3_vl_moe_text", "qwen4_exp_text", "sarvam_mla", "sarvam_moe", "solar_open", "step3p5",
)  # fmt: skip
DENSE = (
    "apertus", "apertus1p5_text", "arcee", "bamba", "bitnet", "cohere", "cohere2", "cohere_compass_text", "cwm",
    "diffllama", "ernie4_5", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_unified_text", "glm",
    "glm4", "glm4v_text", "glm_ocr_text", "granite", "granite4_vision_text", "granite_docling_text", "granite_swa",
    "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2", "lfm3", "llama",
    "minicpm3", "ministral", "ministral3", "mistral", "muse_glimmer_text", "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "olmo_hybrid", "paddleocr_vl_text", "persimmon", "phi", "phi3", "qwen2", "qwen2_5_omni_text",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_5_text", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "vaultgemma", "youtu", "zamba2",
)  # fmt: skip
SUPPORTED = tuple(sorted(MOE + DENSE))
# The first release of transformers that runs a family, where the oldest supported release does not: it lacks the family
# or, of aria_text, the interface of experts.
SINCE = {
    "apertus1p5_text": "5.24", "aria_text": "5.18", "bailing_hybrid": "5.23", "beam": "5.21", "dots3_note_text": "5.23",
    "flint": "5.21", "granite_docling_text": "5.23", "internlm3": "5.23", "iquestcoder": "5.23", "kolibri1": "5.20",
    "lara_mini": "5.24", "lfm3": "5.23", "muse_spark_text": "5.20", "qwen4_exp_text": "5.24", "sarvam_mla": "5.24",
    "sarvam_moe": "5.24",
}  # fmt: skip
# Those with an indexer that chooses `index_topk` tokens for each token to attend to: DeepSeek's sparse attention.
INDEXED = {"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa"}
# Those whose indexers choose blocks of keys for each of their heads.
BLOCK_SPARSE = {"minimax_m3_vl_text"}
# Those with an indexer that chooses blocks of tokens by the means of their keys, beside keys and values for each head.
BLOCK_INDEXED = {"qwen4_exp_text"}
# Those with latent attention (MLA): layers that attend cache a latent and a rotated key for all their heads.
LATENT = INDEXED | {
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3",
    "mistral4", "sarvam_mla", "youtu",
}  # fmt: skip
# Those whose stacked experts are [E, in, out] in published files and [E, out, in] in files that transformers writes.
EITHER_WAY = {"qwen3_vl_moe_text"}
# Model types that checkpoints name and transformers does not, and the family whose model they are.
SAME_AS = {"kimi_k2": "deepseek_v3"}
WANTING = {
    "sparse attention by pooled keys, which the cache has no place for": ("glm5_next_text",),
    "sinks in latent attention: latents are stored around a mean, which only weights that sum to one restore": (
        "hy_v4", "hy_v4_vl_text",
    ),
    "latents that several layers share": ("mistral_large4_text",),
    "attention to all of the prompt and a window of the answer": ("unlimited_ocr_text",),
    "recurrent layers and no attention: a job needs layers with keys and values": (
        "falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm",
    ),
    "a scan for each of its heads, whose parameters are stacks of matrices": ("zamba",),
    "convolutions inside its attention layers: they need a state beside keys and values": (
        "inkling2_loop_text", "inkling2_text", "inkling_text", "zaya",
    ),
    "a recurrence whose module keeps its own state (RG-LRU)": ("recurrent_gemma",),
    "compressed attention: its layers keep running summaries of the past, which the paged cache cannot store": (
        "deepseek_v4",
    ),
    "attention that is computed from more than queries, keys and values": ("doge", "hrm_text"),
    "experts inside its attention layers": ("jetmoe",),
    "experts as rows of one matrix, and layers under names of its own": ("dbrx",),
    "several residual streams (AltUp), and layers that use the keys of others": ("gemma3n_text",),
    "bytes instead of tokens": ("blt",),
    "positions that are learned, counted by sines or added to scores, not rotary": (
        "biogpt", "bloom", "cpmant", "ctrl", "git", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo",
        "kosmos_2_5_text_model", "kosmos_2_text_model", "mpt", "openai-gpt", "opt", "xglm", "xlm", "xlnet",
    ),
    "tensors under names of its own, which are not read": (
        "codegen", "cosmos3_edge", "cosmos3_omni", "dory", "exaone", "falcon", "gpt_neox", "gpt_neox_japanese", "gptj",
        "hunyuan_vl_text", "modernbert-decoder", "molmo2_text",
    ),
    "pictures or sound as tokens of the same vocabulary": ("chameleon", "emu3_text_model", "moshi"),
    "layers that attend to pictures between those that attend to text": ("idefics", "mllama_text_model"),
    "adapters that change with the kind of input": ("phi4_multimodal",),
    "a model beside it whose guesses it completes": ("gemma4_assistant", "gemma4_unified_assistant"),
    "attention to the whole prompt in both directions": ("paligemma",),
    "something else than text as its answer, or sound as its input": (
        "diffusion_gemma_text", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "pi0", "shieldgemma2",
    ),
}  # fmt: skip
# Where checkpoints name a dense matrix otherwise than transformers' module: part of the name, and what it becomes.
_RENAMED: dict[str, Mapping[str, str]] = {
    "axk2": {"self_attn.q_b_proj.": "self_attn.q_gate_proj.", "W_down.": "mlp.fc1.", "W_up.": "mlp.fc2."},
    "bailing_hybrid": {
        "attention.f_proj.": "self_attn.forget_gate.f_proj.",
        "self_attn.f_proj.": "self_attn.forget_gate.f_proj.",
        "attention.dense.": "self_attn.o_proj.",
        "attention.": "self_attn.",
    },
    "kimi_linear": {
        "self_attn.f_a_proj.": "self_attn.forget_gate.f_a_proj.",
        "block_sparse_moe.": "mlp.",
        "self_attn.f_b_proj.": "self_attn.forget_gate.f_b_proj.",
    },
    "lfm3": {"self_attn.gate_proj.": "self_attn.g_proj."},
    "hy_v3": {"mlp.shared_mlp.": "mlp.shared_experts.", "mlp.router.gate.": "mlp.gate."},
    "laguna": {"mlp.shared_expert.": "mlp.shared_experts."},
    "minimax_m3_vl_text": {"block_sparse_moe.": "mlp.", "self_attn.index_": "self_attn.indexer."},
    "sarvam_moe": {"attention.dense.": "self_attn.o_proj.", "attention.": "self_attn."},
    "step3p5": {"share_expert.": "mlp.shared_experts."},
}
# Families whose files hold several matrices as one, row by row: part of its name, and those of its parts.
JOINED: dict[str, tuple[str, tuple[str, ...]]] = {
    "lara_mini": ("linear_attn.in_proj.", tuple(f"linear_attn.in_proj_{part}." for part in ("qkv", "z", "b", "a"))),
    "sarvam_moe": ("query_key_value.", ("q_proj.", "k_proj.", "v_proj.")),
}
# Families some of whose layers share blocks, which are held in memory beside what layer 0 has of its own.
SHARING = {"zamba2"}
# Families whose modules have one matrix where files have several: part of its name, and those of its parts.
MERGED: dict[str, tuple[str, tuple[str, ...]]] = {
    "minimax_m3_vl_text": (".gate_up_proj.", (".gate_proj.", ".up_proj.")),
}


@dataclass(frozen=True, slots=True)
class Family:
    """One transformers `model_type`.

    `transposed_experts` says that expert matrices are stored as [E, in, out], `rope_by_kind` that rotary parameters
    are given for each kind of layer, `partial_rotary` that some of a head's elements may be left unrotated.
    """

    model_type: str
    transposed_experts: bool = False
    rope_by_kind: bool = False
    partial_rotary: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


def family(model_type: object, *, own_code: bool = False) -> Family:
    """The family of a `model_type`; `own_code` says that its checkpoint brings code for it (`auto_map`).

    Raises UnsupportedModel, naming what is missing where that is known, and OldTransformers.
    """
    model_type = SAME_AS.get(model_type, model_type) if isinstance(model_type, str) else model_type
    if not isinstance(model_type, str) or model_type not in SUPPORTED:
        unrun = " Its checkpoint brings code of its own (auto_map), which is never run." if own_code else ""
        raise UnsupportedModel(refusal(model_type) + unrun)
    if model_type in SINCE:
        require_transformers(SINCE[model_type], f"model type {model_type!r}")
    return Family(model_type, **_generated()[model_type], renamed=_RENAMED.get(model_type, {}))


def refusal(model_type: object) -> str:
    """Why a `model_type` does not run."""
    for reason, members in WANTING.items():
        if model_type in members:
            return f"model type {model_type!r} has {reason}. docs/tables/models.md lists the {len(SUPPORTED)} that run."
    return f"model type {model_type!r:.80} is not supported; docs/tables/models.md lists the {len(SUPPORTED)} that run."


@cache
def _generated() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files(__package__).joinpath("defaults.json").read_text())
    return table


# The model types whose answer to text alone is that of their text model, and the type of that where the file names
# none.
WRAPPERS: Mapping[str, str] = {
    "apertus1p5": "apertus1p5_text",
    "aria": "aria_text",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "cohere_compass": "cohere_compass_text",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "dots3_note": "dots3_note_text",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
    "exaone4_5": "exaone4",
    "fast_vlm": "qwen2",
    "fuyu": "persimmon",
    "glm46v": "glm4v_text",
    "glmga": "glm4v_text",
    "got_ocr2": "qwen2",
    "granite4_vision": "granite4_vision_text",
    "granite_docling": "granite_docling_text",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "janus": "llama",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "lighton_ocr": "qwen3",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "muse_glimmer": "muse_glimmer_text",
    "nemotron_h_omni": "nemotron_h",
    "ovis2": "qwen2",
    "paddleocr_vl": "paddleocr_vl_text",
    "perception_lm": "llama",
    "pp_chart2table": "qwen2",
    "qianfan_ocr": "qwen3",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "muse_spark": "muse_spark_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "step3p7": "step3p5",
}
# Text models, and the type whose tensors of files theirs are read as, where that is not their own.
CONVERTED_AS = {
    "deepseek_ocr2_text": "qwen2_moe", "ernie4_5_vl_moe_text": "ernie4_5_moe", "glm4v_moe_text": "qwen2_moe",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "qwen3_omni_moe_text": "qwen2_moe", "qwen3_vl_moe_text": "qwen3_vl_moe", "step3p5": "step3p7",
}  # fmt: skip
# One with experts for pictures beside those for text: its files number them as one list, text's first.
TEXT_AND_PICTURES = "ernie4_5_vl_moe_text"
# What the outer configuration says of the text model, too.
_OUTER = (*KEYS, "dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
# As transformers' releases write them, the longest first.
_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.backbone.": "backbone.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    # As those of older releases, and of the model's makers, who put other parts beside the text model.
    "model.layers.": "model.layers.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.norm.": "model.norm.",
}


def is_wrapper(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model with a text model inside."""
    return isinstance(_thinking(values).get("text_config"), dict)


def _thinking(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the part that understands, where a model has others that speak."""
    inner = values.get("thinker_config")
    return inner if isinstance(inner, dict) else values


def text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model in that of a whole one. Raises UnsupportedModel for types not read so."""
    outermost, values = values, _thinking(values)
    model_type, inner = values.get("model_type"), values["text_config"]
    for each in (model_type, inner.get("model_type")):
        if any(each in members for members in WANTING.values()):
            raise UnsupportedModel(refusal(each))
    if not isinstance(model_type, str) or model_type not in WRAPPERS:
        raise UnsupportedModel(
            f"config.json: model type {model_type!r:.80} wraps a text model of type {inner.get('model_type')!r:.80}; "
            f"docs/tables/models.md lists the types that text models are read out of"
        )
    both = {**outermost, **values}
    outer = {name: both[name] for name in _OUTER if both.get(name) is not None}
    return {"model_type": WRAPPERS[model_type], **inner, **outer}


def text_name(name: str) -> str | None:
    """The name that the text model gives to a tensor of a whole checkpoint; None for other parts' tensors."""
    name = name.removeprefix("thinker.")
    if ".mtp." in name:
        # Layers that predict further tokens, inside the text model.
        return None
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None
