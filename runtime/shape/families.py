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
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4_text", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe", "llama4_text", "longcat_flash",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
DENSE = (
    "apertus", "arcee", "bamba", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "falcon_h1", "gemma",
    "gemma2", "gemma3_text", "gemma4_unified_text", "glm", "glm4", "granite", "granite_swa", "helium",
    "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "lfm2", "lfm3", "llama", "minicpm3",
    "ministral", "ministral3", "mistral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmo_hybrid", "persimmon",
    "phi", "phi3", "qwen2", "qwen3", "qwen3_5_text", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
    "youtu",
)  # fmt: skip
SUPPORTED = tuple(sorted(MOE + DENSE))
# The first release of transformers that runs a family, where the oldest supported release does not: it lacks the family
# or, of aria_text, the interface of experts.
SINCE = {
    "aria_text": "5.18", "bailing_hybrid": "5.23", "beam": "5.21", "flint": "5.21", "internlm3": "5.23",
    "iquestcoder": "5.23", "kolibri1": "5.20", "lfm3": "5.23",
}  # fmt: skip
# Those with an indexer that chooses `index_topk` tokens for each token to attend to: DeepSeek's sparse attention.
INDEXED = {"axk2", "deepseek_v32", "glm_moe_dsa"}
# Those with latent attention (MLA): layers that attend cache a latent and a rotated key for all their heads.
LATENT = INDEXED | {
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3",
    "youtu",
}  # fmt: skip
# Model types that checkpoints name and transformers does not, and the family whose model they are.
SAME_AS = {"kimi_k2": "deepseek_v3"}
WANTING = {
    "sparse attention: its indexer chooses tokens in another way than DeepSeek's": (
        "dots3_note_text", "glm5_next_text", "hy_v4", "mistral_large4_text",
    ),
    "no class for text alone in transformers": ("mistral4",),
    "recurrent layers and no attention: a job needs layers with keys and values": ("falcon_mamba", "mamba", "mamba2"),
    "blocks that several layers share: weights are read layer by layer, each layer's from its own tensors": (
        "zamba", "zamba2",
    ),
    "convolutions inside its attention layers: they need a state beside keys and values": (
        "inkling2_text", "inkling_text", "zaya",
    ),
    "a recurrence whose module keeps its own state (RG-LRU)": ("recurrent_gemma",),
    "compressed attention: its layers keep running summaries of the past, which the paged cache cannot store": (
        "deepseek_v4",
    ),
    "block-sparse attention: its indexer chooses blocks of a cache that it keeps itself": ("minimax_m3_vl_text",),
    "attention that is computed from more than queries, keys and values": ("diffllama", "doge", "hrm_text"),
    "experts inside its attention layers": ("jetmoe",),
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
    "aria": "aria_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# What the outer configuration says of the text model, too.
_OUTER = (*KEYS, "dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
# As transformers' releases write them, the longest first.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def is_wrapper(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model with a text model inside."""
    return isinstance(values.get("text_config"), dict)


def text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model in that of a whole one. Raises UnsupportedModel for types not read so."""
    model_type, inner = values.get("model_type"), values["text_config"]
    if not isinstance(model_type, str) or model_type not in WRAPPERS:
        raise UnsupportedModel(
            f"config.json: model type {model_type!r:.80} wraps a text model of type {inner.get('model_type')!r:.80}; "
            f"text models are read out of {', '.join(WRAPPERS)} only"
        )
    outer = {name: values[name] for name in _OUTER if values.get(name) is not None}
    return {"model_type": WRAPPERS[model_type], **inner, **outer}


def text_name(name: str) -> str | None:
    """The name that the text model gives to a tensor of a whole checkpoint; None for other parts' tensors."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None
