"""The metadata of a GGUF file as its architecture has them: keys, layers, and how positions are rotated. Torch-free."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from ...offload.checkpoint.header import TensorEntry, described
from ..settings.errors import UnsupportedModel
from .config import MAX_LAYERS
from .quantized import ReadSmall

Values = dict[str, Any]
FREQUENCIES = "rope_freqs.weight"
_MAX_FREQUENCIES = 1024
# Of Llama 3.1 and later; its converter writes what comes of them, and not the numbers.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class File:
    """The metadata of one architecture, and the shapes of tensors; `layers` are those that no other tokens are for."""

    def __init__(
        self, metadata: Mapping[str, Any], entries: Mapping[str, TensorEntry], read: ReadSmall | None = None
    ) -> None:
        self.metadata = metadata
        self.entries = entries
        self.read = read
        self.architecture = str(metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture; one value where a list has the same for all layers."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        if isinstance(value, float) and not math.isfinite(value):
            raise UnsupportedModel(f"GGUF: {self.architecture}.{key} is {value}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise UnsupportedModel(f"GGUF: {self.architecture}.{key} is {described(value)}, wanted a number")
        return value

    def only(self, key: str, default: Any = None) -> Any:
        """The number of a list that layers have, where some have 0."""
        value = self.get(key, default)
        found = {each for each in value if each} if isinstance(value, list) else {value}
        if len(found) != 1 or not all(type(each) is int for each in found):
            raise UnsupportedModel(f"GGUF: {self.architecture}.{key} is {described(value)}, wanted one number or 0")
        return found.pop()

    @property
    def predicting(self) -> int:
        """The layers at the end that predict tokens after the next one (MTP)."""
        return self.size("nextn_predict_layers", 0)

    @property
    def layers(self) -> int:
        return max(self.size("block_count") - self.predicting, 0)

    def has(self, part: str, layer: int = 0) -> bool:
        return f"blk.{layer}.{part}" in self.entries

    def rows(self, part: str) -> int | None:
        """The outputs of a matrix of the first layer that has it."""
        found = (entry for name, entry in self.entries.items() if name.endswith(f".{part}.weight"))
        entry = next(found, None)
        return entry.shape[-2] if entry is not None and len(entry.shape) > 1 else None

    def kinds(self, kinds: Mapping[str, str], other: str) -> list[str]:
        """The kind of each layer by a tensor that it has."""
        every = range(min(self.layers, MAX_LAYERS))
        return [next((kind for part, kind in kinds.items() if self.has(part, layer)), other) for layer in every]

    def sliding(self, full_every: int) -> list[str]:
        """The kind of each layer by the file's pattern; without one all but the last of every few slide."""
        slides = self.metadata.get(f"{self.architecture}.attention.sliding_window_pattern")
        if not isinstance(slides, list):
            slides = [(layer + 1) % full_every != 0 for layer in range(min(self.layers, MAX_LAYERS))]
        return ["sliding_attention" if each else "full_attention" for each in slides[: self.layers]]


def rope_parameters(file: File, width: int | None, partial: bool | None) -> Values:
    """Rotary positions; of a head of `width` elements perhaps a part is rotated."""
    rope = {"rope_theta": file.get("rope.freq_base", 10_000.0), **_scaling(file)}
    rotated = file.get("rope.dimension_count", width)
    if partial is None or not width or (not partial and rotated == width):
        return rope
    if not partial:
        raise UnsupportedModel(f"GGUF: {described(rotated)} of {width} elements of a head are rotated, wanted all")
    return {**rope, "partial_rotary_factor": file.size("rope.dimension_count", width) / width}


def ending_tokens(metadata: Mapping[str, Any]) -> list[Any] | None:
    """The tokens that end an answer: of the text, of a turn, of a message. Raises UnsupportedModel."""
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    for name, token in found.items():
        if token is not None and type(token) is not int:
            raise UnsupportedModel(f"GGUF: tokenizer.ggml.{name}_token_id is {described(token)}, wanted a number")
    return list(dict.fromkeys(token for token in found.values() if token is not None)) or None


def _scaling(file: File) -> Values:
    if file.architecture == "gemma4":
        # The factors say there which elements rotate.
        return {"rope_type": "default"}
    kind, factor = file.get("rope.scaling.type", "none"), file.get("rope.scaling.factor", 1.0)
    if FREQUENCIES in file.entries:
        return _llama3(file)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"GGUF: rotary positions are scaled by {described(kind)}, wanted linear or yarn")
    given = {
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
        "beta_fast": file.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": file.get("rope.scaling.yarn_attn_factor"),
    }
    return {"rope_type": "yarn", "factor": factor, **{name: value for name, value in given.items() if value}}


def _llama3(file: File) -> Values:
    """The scaling whose factors by frequency are those of the file."""
    entry = file.entries[FREQUENCIES]
    found = floats(file, entry)
    scaling = {**_LLAMA3, "factor": float(f"{max(found):.4g}")}
    wanted = _factors(float(file.get("rope.freq_base", 10_000.0)), entry.numel, scaling)
    if not all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(found, wanted, strict=True)):
        raise UnsupportedModel(f"GGUF: {FREQUENCIES} is not the scaling of Llama 3, which alone is read")
    return {"rope_type": "llama3", **scaling}


def floats(file: File, entry: TensorEntry) -> tuple[float, ...]:
    if file.read is None or entry.dtype != "F32" or entry.numel > _MAX_FREQUENCIES:
        raise UnsupportedModel(f"GGUF: {FREQUENCIES} is {entry.dtype} {list(entry.shape)}, wanted few F32")
    return struct.unpack(f"<{entry.numel}f", file.read(FREQUENCIES))


def _factors(theta: float, count: int, scaling: Mapping[str, float]) -> list[float]:
    """What each frequency is divided by (transformers' `_compute_llama3_parameters`)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for index in range(count):
        turns = scaling["original_max_position_embeddings"] * theta ** (-index / count) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors
