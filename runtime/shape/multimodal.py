"""Checkpoints of models that also see or hear, read as the text model inside them. Torch-free.

Their config.json has the text model's own configuration as `text_config`, and their files its tensors under a prefix
(transformers' `*ForConditionalGeneration`). Other tensors are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..settings.errors import UnsupportedModel
from .quantization import KEYS

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
