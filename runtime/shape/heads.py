"""How many heads of which size a layer's cache holds: where families differ between their own layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .windows import kind

if TYPE_CHECKING:
    from .config import ModelConfig


def kv_heads(config: ModelConfig, layer: int) -> int:
    """Key and value heads of a layer."""
    heads: int = config.get("num_key_value_heads") or config.size("num_attention_heads")
    sliding = kind(config, layer) == "sliding_attention"
    if config.family.model_type == "mimo_v2_flash" and sliding:
        return 2 * heads
    if config.family.model_type in _GLOBAL_HEADS and not sliding:
        own = _own(config, layer, "num_key_value_heads")
        return own or (config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None) or heads
    return heads


def head_dim(config: ModelConfig, layer: int) -> int:
    """Elements of a layer's keys, or of its values where those are longer; the shorter are padded."""
    size: int = config.get("head_dim") or config.size("hidden_size") // config.size("num_attention_heads")
    if config.family.model_type in _GLOBAL_HEADS and kind(config, layer) != "sliding_attention":
        return _own(config, layer, "head_dim") or config.get("global_head_dim") or 512
    return max(size, config.get("v_head_dim") or 0)


# Layers without a window have heads of their own; transformers' class knows the default of 512.
_GLOBAL_HEADS = {"gemma4_text", "gemma4_unified_text"}


def _own(config: ModelConfig, layer: int, name: str) -> int | None:
    """What newer releases write instead of the `global` fields: settings by layer."""
    layers = config.get("per_layer_config") or {}
    for index, settings in layers.items():
        if int(index) == layer:
            found: int | None = settings.get(name)
            return found
    return None
