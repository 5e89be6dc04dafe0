"""Which layers look back only so many tokens, where config.json has no `layer_types`: each family's own rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .config import ModelConfig

Kind = Literal["full_attention", "sliding_attention", "chunked_attention"]
Rule = Callable[["ModelConfig", int], bool]


def kind(config: ModelConfig, layer: int) -> Kind:
    """How far a layer looks back: everywhere, a window, or to the start of its chunk of positions."""
    kinds = config.get("layer_types")
    if kinds is not None:
        found: Kind = kinds[layer]
        return found
    rule = SLIDING.get(config.family.model_type)
    if rule is None or not rule(config, layer):
        return "full_attention"
    return "chunked_attention" if config.family.model_type in CHUNKED else "sliding_attention"


def window(config: ModelConfig, layer: int) -> int | None:
    """Tokens that a layer looks back at most, itself included; None for all."""
    found = kind(config, layer)
    if found == "full_attention" or config.get("use_sliding_window") is False:
        return None
    if config.family.model_type not in SLIDING:
        return None
    size: int | None = config.get("attention_chunk_size" if found == "chunked_attention" else "sliding_window")
    return size


def _last_of(period: int, field: str = "") -> Rule:
    """All slide but the last of every `period` layers; a field of the config may say another period."""
    return lambda config, layer: (layer + 1) % int((config.get(field) if field else None) or period) != 0


def _first_of(period: int) -> Rule:
    return lambda config, layer: layer % period != 0


def _always(config: ModelConfig, layer: int) -> bool:
    return True


def _never(config: ModelConfig, layer: int) -> bool:
    return False


def _late(config: ModelConfig, layer: int) -> bool:
    return layer >= config.size("max_window_layers")


def _early_and_odd(config: ModelConfig, layer: int) -> bool:
    return (layer + 1) % 2 != 0 and layer < config.size("max_window_layers")


def _last_of_six_and_ends(config: ModelConfig, layer: int) -> bool:
    return (layer + 1) % 6 != 0 and layer + 1 != config.size("num_hidden_layers")


def _mimo(config: ModelConfig, layer: int) -> bool:
    return layer != 0 and (layer + 1) % 6 != 0


def _flint(config: ModelConfig, layer: int) -> bool:
    return layer >= 2 and layer % 4 != 1 and layer + 1 != config.size("num_hidden_layers")


def _cohere_moe(config: ModelConfig, layer: int) -> bool:
    dense = config.get("first_k_dense_replace") or 0
    if layer < dense:
        return (layer + 1) % (config.get("prefix_dense_sliding_window_pattern") or 1) != 0
    return (layer - dense + 1) % (config.get("sliding_window_pattern") or 4) != 0


def _where_rotary(config: ModelConfig, layer: int) -> bool:
    """llama4: layers with rotary positions are chunked."""
    given = config.get("no_rope_layers")
    return bool(given[layer]) if given else (layer + 1) % (config.get("no_rope_layer_interval") or 4) != 0


def _where_not_rotary(config: ModelConfig, layer: int) -> bool:
    return not _where_rotary(config, layer)


# Families in which no window given means that no layer slides.
OPTIONAL = {
    "dots1", "exaone4", "exaone_moe", "ministral", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2", "cwm",
}  # fmt: skip
# Families whose sliding layers look back to the start of a chunk instead.
CHUNKED = {"llama4_text"}
# A family that is not here has no window, whatever its config says.
SLIDING: dict[str, Rule] = {
    "afmoe": _last_of(4, "global_attn_every_n_layers"),
    "beam": _last_of_six_and_ends,
    "cohere2": _last_of(4, "sliding_window_pattern"),
    "cohere2_moe": _cohere_moe,
    "cwm": _first_of(4),
    "dots1": _late,
    "exaone4": _last_of(4, "sliding_window_pattern"),
    "exaone_moe": _last_of(4, "sliding_window_pattern"),
    "flint": _flint,
    "gemma2": _last_of(2),
    "gemma3_text": _last_of(6, "sliding_window_pattern"),
    "gemma4_text": _last_of_six_and_ends,
    "gemma4_unified_text": _last_of_six_and_ends,
    "gpt_oss": _last_of(2),
    "granite_swa": _first_of(4),
    "granitemoe_swa": _first_of(4),
    "kolibri1": _last_of(5),
    "laguna": _never,
    "llama4_text": _where_rotary,
    "mellum": _never,
    "mimo_v2_flash": _mimo,
    "ministral": _always,
    "ministral3": _always,
    "mistral": _always,
    "mixtral": _always,
    "olmo3": _last_of(4),
    "phi3": _always,
    "phimoe": _always,
    "qwen2": _late,
    "qwen2_moe": _early_and_odd,
    "qwen3": _late,
    "qwen3_moe": _always,
    "smollm3": _where_not_rotary,
    "starcoder2": _always,
    "vaultgemma": _last_of(2),
}
