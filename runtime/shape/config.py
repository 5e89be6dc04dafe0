"""config.json of a checkpoint, read as hostile text: caps, ranges, no names of code, then defaults.

The values go to a transformers config class only after they passed here: a config key has fetched and run
code before, whatever the trust flag said (CVE-2026-4372, CVE-2026-22807).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...offload.checkpoint.folder_file import read_inside
from ...offload.checkpoint.json_object import described, load_object
from ..errors import UnsupportedModel
from .config_fields import FIELDS, LISTS, NESTED, checked_fields, out_of_range
from .families import Family, family
from .rope import ROPE_FIELDS, check_rope
from .windows import CHUNKED, OPTIONAL, kind

CONFIG = "config.json"
MAX_CONFIG_NBYTES = 1 << 20
MAX_DEPTH = 32
_NAMES_CODE = ("auto_map", "custom_pipelines", "kernel", "trust_remote_code", "_implementation")
_KNOWN = {"model_type", *FIELDS, *LISTS, *ROPE_FIELDS, *NESTED}


class ModelConfig:
    """The checked values of one config.json; `get` falls back to the family's defaults."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.family: Family = family(values.get("model_type"))
        _refuse_code(values, CONFIG)
        _refuse_quantized(values)
        self.values = checked_fields({key: value for key, value in values.items() if key in _KNOWN})
        check_rope(self.values, self.family.rope_by_kind, self.family.partial_rotary)
        self._check_heads()
        self._check_layer_types()
        self._check_experts()

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        path = folder / CONFIG
        if not path.exists():
            raise UnsupportedModel(f"{path} is missing; {folder} is not the folder of a transformers checkpoint")
        try:
            return cls(load_object(read_inside(folder, CONFIG, MAX_CONFIG_NBYTES)))
        except ValueError as error:
            raise UnsupportedModel(f"{path}: not the JSON of a configuration ({error})") from None

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
            raise out_of_range(name, value, "a number")
        return value

    @property
    def num_experts(self) -> int | None:
        """Experts of a layer, under whichever name; None for a dense family."""
        return self._first(_COUNTS)

    @property
    def experts_per_token(self) -> int:
        """Experts that a token is routed to, under whichever name."""
        count = self._first(_PER_TOKEN)
        if count is None:
            raise out_of_range("num_experts_per_tok", None, "a number, because the files hold experts")
        return count

    def _first(self, names: tuple[str, ...]) -> int | None:
        found: list[int] = [value for name in names if (value := self.get(name))]
        return found[0] if found else None

    def _check_heads(self) -> None:
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        kv_heads = self.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise out_of_range("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
        if hidden % heads and (self.get("head_dim") is None or self.family.model_type in _WHOLE_HEADS):
            raise out_of_range("hidden_size", hidden, f"a multiple of num_attention_heads {heads}")
        if (self.get("head_dim") or hidden // heads) % 2:
            raise out_of_range("head_dim", self.get("head_dim") or hidden // heads, "an even number")
        if (pad := self.get("pad_token_id")) is not None and pad >= self.size("vocab_size"):
            raise out_of_range("pad_token_id", pad, f"less than vocab_size {self.size('vocab_size')}")

    def _check_layer_types(self) -> None:
        num_layers = self.size("num_hidden_layers")
        for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "num_attention_heads_per_layer"):
            given = self.get(name)
            # Llama 4 takes an empty list as one that was not given.
            absent = given is None or (name == "no_rope_layers" and not given)
            if not absent and len(given) != num_layers:
                raise out_of_range(name, given, f"an item for each of {num_layers} layers")
        kinds = {kind(self, layer) for layer in range(num_layers)}
        if "chunked_attention" in kinds and self.family.model_type not in CHUNKED:
            raise out_of_range("layer_types", "chunked_attention", "another kind of layer in this family")
        if "sliding_attention" in kinds and self.family.model_type in CHUNKED:
            raise out_of_range("layer_types", "sliding_attention", "another kind of layer in this family")
        field = "attention_chunk_size" if self.family.model_type in CHUNKED else "sliding_window"
        explicit = self.get("layer_types") or self.family.model_type not in OPTIONAL
        if len(kinds - {"full_attention"}) and explicit and self.get(field) is None:
            raise out_of_range(field, None, "a number, because layers slide")

    def _check_experts(self) -> None:
        given = {name: self.values[name] for name in _COUNTS if self.values.get(name) is not None}
        if len(set(given.values())) > 1:
            (first, count), (other, found) = list(given.items())[:2]
            raise out_of_range(other, found, f"{first} {count}")
        count, per_token = self.num_experts, self._first(_PER_TOKEN)
        if count is not None and per_token is not None and per_token > count:
            raise out_of_range("num_experts_per_tok", per_token, f"at most num_experts {count}")


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
# Families whose own class wants it although head_dim is given.
_WHOLE_HEADS = {"gemma3_text", "llama"}


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
                f"{where}: {described(key)} names code or is private; moedge runs no code of a checkpoint"
            )
        _refuse_code(item, f"{where}.{key if key.isidentifier() and key.isascii() else ascii(key)}"[:200], depth + 1)


def _refuse_quantized(values: dict[str, Any]) -> None:
    quantization = values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(
            f"config.json: the checkpoint is already quantized ({described(method)}); use its bf16 or fp16 original"
        )
