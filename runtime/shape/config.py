"""config.json of a checkpoint, read as hostile text: caps, ranges, no names of code, then defaults.

The values go to a transformers config class only after they passed here: a config key has fetched and run
code before, whatever the trust flag said (CVE-2026-4372, CVE-2026-22807).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UnsupportedModel
from .families import Family, family

MAX_CONFIG_NBYTES = 4 << 20
MAX_DEPTH = 32
# The largest value of each size that decides an allocation; the smallest is 1 unless it says 0.
_RANGES: dict[str, tuple[int, int]] = {
    "num_hidden_layers": (1, 512),
    "hidden_size": (1, 65_536),
    "intermediate_size": (0, 1 << 20),
    "moe_intermediate_size": (0, 1 << 20),
    "num_attention_heads": (1, 1_024),
    "num_key_value_heads": (1, 1_024),
    "head_dim": (1, 1_024),
    "num_experts": (0, 1_024),
    "num_local_experts": (0, 1_024),
    "num_experts_per_tok": (0, 1_024),
    "vocab_size": (1, 1 << 20),
    "max_position_embeddings": (1, 1 << 28),
    "sliding_window": (1, 1 << 28),
}
_NAMES_CODE = ("auto_map", "custom_pipelines", "kernel", "trust_remote_code", "_implementation")


class ModelConfig:
    """The checked values of one config.json; `get` falls back to the family's defaults."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.family: Family = family(values.get("model_type"))
        self.values = {key: value for key, value in values.items() if not key.startswith("transformers_")}
        _refuse_code(self.values, "config.json")
        _refuse_quantized(self.values)
        for name, (least, most) in _RANGES.items():
            _check_range(name, self.values.get(name), least, most)
        self._check_layer_types()

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        path = folder / "config.json"
        if not path.is_file():
            raise UnsupportedModel(f"{path} is missing; {folder} is not the folder of a transformers checkpoint")
        if (nbytes := path.stat().st_size) > MAX_CONFIG_NBYTES:
            raise UnsupportedModel(f"{path}: {nbytes} bytes, at most {MAX_CONFIG_NBYTES} are read")
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UnsupportedModel(f"{path}: not JSON ({error})") from None
        if not isinstance(values, dict):
            raise UnsupportedModel(f"{path}: a JSON object was wanted, found {type(values).__name__}")
        return cls(values)

    def get(self, name: str) -> Any:
        """A field under its own name or the family's alias; None where neither file nor defaults have it."""
        for key in (name, self.family.aliases.get(name, name)):
            if key in self.values:
                return self.values[key]
        for key in (name, self.family.aliases.get(name, name)):
            if key in self.family.defaults:
                return self.family.defaults[key]
        return None

    def size(self, name: str) -> int:
        """A field that must be a number."""
        value = self.get(name)
        if type(value) is not int:
            raise UnsupportedModel(f"config.json: {name} is {value!r:.40}, a number was wanted")
        return value

    def _check_layer_types(self) -> None:
        kinds, num_layers = self.get("layer_types"), self.size("num_hidden_layers")
        known = {"full_attention", "sliding_attention"}
        if kinds is not None and (
            not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= known
        ):
            raise UnsupportedModel(
                f"config.json: layer_types {str(kinds)[:60]} is not one of {sorted(known)} x {num_layers} layers"
            )


def _check_range(name: str, value: Any, least: int, most: int) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise UnsupportedModel(f"config.json: {name} is {value!r:.40}, wanted a number from {least} to {most}")


def _refuse_code(value: Any, where: str, depth: int = 0) -> None:
    """Raises UnsupportedModel for private keys and for keys that name code, a kernel or another repository."""
    if depth > MAX_DEPTH:
        raise UnsupportedModel(f"{where}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        for item in value:
            _refuse_code(item, where, depth + 1)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        # Gemma saves a private number; what names code is a string.
        private = key.startswith("_") and key != "_name_or_path" and not isinstance(item, int | float)
        if item is not None and (private or any(name in key for name in _NAMES_CODE)):
            raise UnsupportedModel(
                f"{where}: {key!r:.60} names code or is private; moedge runs no code of a checkpoint"
            )
        _refuse_code(item, f"{where}.{key}"[:200], depth + 1)


def _refuse_quantized(values: dict[str, Any]) -> None:
    quantization = values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(
            f"config.json: the checkpoint is already quantized ({method!r:.40}); use its bf16 or fp16 original"
        )
