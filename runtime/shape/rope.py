"""The part of config.json that scales rotary positions: which kinds run here, and what each needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...offload.checkpoint.json_object import described
from ..errors import UnsupportedModel
from .config_fields import Number, out_of_range

ROPE_FIELDS = ("rope_parameters", "rope_scaling")
_FACTOR = Number(1, 1e6)
_NUMBERS: dict[str, Number] = {
    "rope_theta": Number(2, 1e12),
    "factor": _FACTOR,
    "original_max_position_embeddings": Number(1, 1 << 28, whole=True),
    "low_freq_factor": Number(1e-3, 1e6),
    "high_freq_factor": Number(1e-3, 1e6),
    "beta_fast": Number(1e-3, 1e6),
    "beta_slow": Number(1e-3, 1e6),
    "attention_factor": Number(1e-3, 1e3),
    "mscale": Number(1e-3, 1e3),
    "mscale_all_dim": Number(1e-3, 1e3),
    "partial_rotary_factor": Number(0.01, 1),
    "max_position_embeddings": Number(1, 1 << 28, whole=True),
    "llama_4_scaling_beta": Number(0, 1e3),
}
# `dynamic` and `longrope` turn with the longest sequence of a pass: a row's answer would depend on its neighbours.
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "proportional": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
LAYER_KINDS = {"full_attention", "sliding_attention"}


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
                    _check(part, f"{name}.{kind}", partial)
        else:
            _check(rope, name, partial)
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise UnsupportedModel("config.json: rope_scaling and rope_parameters differ, wanted one of them")


def _check(rope: object, where: str, partial: bool) -> None:
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
        if name not in _NUMBERS and name not in {"rope_type", "type", "truncate"}:
            raise out_of_range(f"{where}.{described(name)}", value, f"no other field than {', '.join(_NUMBERS)}")
    if not partial and rope.get("partial_rotary_factor") not in (None, 1):
        raise out_of_range(f"{where}.partial_rotary_factor", rope["partial_rotary_factor"], "1 in this family")
    if not isinstance(rope.get("truncate", True), bool):
        raise out_of_range(f"{where}.truncate", rope["truncate"], "true or false")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise out_of_range(f"{where}.low_freq_factor", rope["low_freq_factor"], "less than high_freq_factor")
