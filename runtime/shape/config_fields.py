"""The fields of config.json that reach a model, and the values each may have. Knows no family and no tensor.

An allow-list: what is not in it is dropped, because a key that transformers knows and this table does not can name
code or decide an allocation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...offload.checkpoint.json_object import described
from ..errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Number:
    """From `least` to `most`, both included."""

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

    values: tuple[bool | str, ...]

    def admits(self, value: object) -> bool:
        return any(type(value) is type(each) and value == each for each in self.values)

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.values))}"


def _whole(least: int, most: int) -> Number:
    return Number(least, most, whole=True)


_FLAG = Choice((True, False))
_SCALE = Number(1e-6, 1e6)
_ACTIVATION = Choice(("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2"))
_LENGTH = _whole(1, 1 << 28)
_TOKEN = _whole(-1, 1 << 20)
FIELDS: dict[str, Number | Choice] = {
    "num_hidden_layers": _whole(1, 512),
    "hidden_size": _whole(1, 65_536),
    "intermediate_size": _whole(1, 1 << 20),
    "moe_intermediate_size": _whole(1, 1 << 20),
    "num_attention_heads": _whole(1, 1_024),
    "num_key_value_heads": _whole(1, 1_024),
    "head_dim": _whole(2, 1_024),
    "num_experts": _whole(1, 1_024),
    "num_local_experts": _whole(1, 1_024),
    "num_experts_per_tok": _whole(1, 1_024),
    "decoder_sparse_step": _whole(1, 512),
    "vocab_size": _whole(2, 1 << 20),
    "max_position_embeddings": _LENGTH,
    "sliding_window": _LENGTH,
    "sliding_window_pattern": _whole(1, 512),
    "max_window_layers": _whole(0, 512),
    "bos_token_id": _TOKEN,
    "pad_token_id": _TOKEN,
    "query_pre_attn_scalar": _whole(1, 1 << 20),
    # Zero would make NaN of a row of zeros.
    "rms_norm_eps": Number(1e-20, 1),
    "rope_theta": Number(2, 1e12),
    "rope_local_base_freq": Number(2, 1e12),
    "partial_rotary_factor": Number(1, 1),
    "embedding_multiplier": _SCALE,
    "residual_multiplier": _SCALE,
    "attention_multiplier": _SCALE,
    "logits_scaling": _SCALE,
    "final_logit_softcapping": _SCALE,
    "attn_logit_softcapping": _SCALE,
    "clip_qkv": _SCALE,
    "swiglu_alpha": _SCALE,
    "swiglu_limit": _SCALE,
    "hidden_act": _ACTIVATION,
    "hidden_activation": _ACTIVATION,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "norm_topk_prob": _FLAG,
    "tie_word_embeddings": _FLAG,
    "use_sliding_window": _FLAG,
    # Attention is causal here.
    "use_bidirectional_attention": Choice((False,)),
}
LISTS: dict[str, Number | Choice] = {
    "layer_types": Choice(("full_attention", "sliding_attention")),
    "mlp_only_layers": _whole(0, 511),
    "eos_token_id": _TOKEN,
}
# Where null means something else than the default.
_NULLABLE = {
    "num_key_value_heads", "head_dim", "sliding_window", "final_logit_softcapping", "attn_logit_softcapping",
    "clip_qkv", "bos_token_id", "pad_token_id", "eos_token_id", "layer_types", "mlp_only_layers",
    "use_bidirectional_attention", "rope_theta", "rope_local_base_freq", "partial_rotary_factor",
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
    return isinstance(rule, Number) and not rule.whole and value is not None


def _check(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is None and name in _NULLABLE:
            continue
        if name in FIELDS and not FIELDS[name].admits(value):
            raise out_of_range(name, value, FIELDS[name])
        if name in LISTS and not _are_all(value, item := LISTS[name]):
            raise out_of_range(name, value, f"a list of at most {_MAX_ITEMS} times {item}")


def out_of_range(name: str, value: object, wanted: object) -> UnsupportedModel:
    """For raising: what was found in config.json under `name`, and what was wanted."""
    return UnsupportedModel(f"config.json: {name} is {described(value)}, wanted {wanted}")


def _are_all(value: object, item: Number | Choice) -> bool:
    items = value if isinstance(value, list) else [value]
    return len(items) <= _MAX_ITEMS and all(map(item.admits, items))
