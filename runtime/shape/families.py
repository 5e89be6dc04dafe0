"""The model families that moedge runs, and the little that their config files do not say.

Defaults of config fields come from `defaults.json`, which `runtime/model/defaults.py` generates from transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ..errors import UnsupportedModel

# Which layers look back only `sliding_window` tokens where config.json has no `layer_types`.
WindowRule = Literal["none", "all", "alternate", "five_of_six", "after_max_window_layers"]


@dataclass(frozen=True, slots=True)
class Family:
    """One transformers `model_type`. `transposed_experts` says that expert matrices are stored as [E, in, out]."""

    model_type: str
    architecture: str
    window: WindowRule = "none"
    transposed_experts: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


_WINDOWS: dict[str, WindowRule] = {
    "gemma3_text": "five_of_six",
    "gpt_oss": "alternate",
    "granitemoe": "none",
    "llama": "none",
    "mixtral": "all",
    "olmoe": "none",
    "qwen3": "after_max_window_layers",
    "qwen3_moe": "all",
}
SUPPORTED = tuple(_WINDOWS)
_WANTING = {
    "latent attention: its cache holds latents, which the paged cache cannot store": (
        "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2",
    ),
    "recurrent layers: they need a state per sequence": (
        "qwen3_next", "qwen3_5_moe", "jamba", "nemotron_h", "minimax", "kimi_linear", "lfm2_moe", "mamba", "mamba2",
    ),
    "experts that are computed outside transformers' experts interface": ("llama4_text", "llama4"),
}  # fmt: skip


def family(model_type: object) -> Family:
    """The family of a `model_type`; raises UnsupportedModel, naming what is missing where that is known."""
    if not isinstance(model_type, str) or model_type not in _WINDOWS:
        raise UnsupportedModel(_refusal(model_type))
    generated = _generated()[model_type]
    return Family(
        model_type,
        generated["architecture"],
        _WINDOWS[model_type],
        transposed_experts=model_type == "gpt_oss",
        defaults=generated["defaults"],
        aliases=generated["aliases"],
    )


def _refusal(model_type: object) -> str:
    for reason, members in _WANTING.items():
        if model_type in members:
            return f"model type {model_type!r} has {reason}. moedge runs {', '.join(SUPPORTED)} for now."
    return f"model type {model_type!r:.80} is not supported; moedge runs {', '.join(SUPPORTED)} for now."


@cache
def _generated() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files(__package__).joinpath("defaults.json").read_text())
    return table
