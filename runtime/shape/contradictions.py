"""What config.json says of a checkpoint against what its headers say: found before a weight is read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.checkpoint.header import TensorEntry
from ...offload.checkpoint.json_object import described
from ...offload.errors import BadCheckpoint
from .config import ModelConfig
from .inventory import has_experts, layer_tensors, outer_tensors

_LAYER = re.compile(r"(?:model\.)?layers\.(0|[1-9]\d{0,3})\.(.+)")
_FLOATS = {"BF16", "F16", "F32", "F64"}
_MOST_TOLD = 10
Shapes = Mapping[str, tuple[int, ...]]


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises BadCheckpoint, with the first ten differences, unless the tensors are those of the config's model."""
    layers, outer = _by_layer(checkpoint.entries)
    num_layers = config.size("num_hidden_layers")
    if sorted(layers) != list(range(num_layers)):
        raise BadCheckpoint(
            f"{checkpoint.folder}: the files hold layers {_span(layers)}, "
            f"config.json wants num_hidden_layers {num_layers}"
        )
    told = list(_differences(config, checkpoint, layers, outer))
    if told:
        more = f"; and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
        raise BadCheckpoint(
            f"{checkpoint.folder}: config.json and the tensors disagree: {'; '.join(told[:_MOST_TOLD])}{more}"
        )


def _differences(
    config: ModelConfig,
    checkpoint: Checkpoint,
    layers: Mapping[int, dict[str, TensorEntry]],
    outer: dict[str, TensorEntry],
) -> Iterator[str]:
    for name, entry in checkpoint.entries.items():
        if entry.dtype not in _FLOATS and not _is_computed(name):
            yield f"{checkpoint.file_of(name)}: {described(name)} is {entry.dtype}, wanted one of {sorted(_FLOATS)}"
    wanted = outer_tensors(config)
    if config.get("tie_word_embeddings") and "lm_head.weight" in outer:
        # Some write the tied head out; transformers does not read it, nor do we.
        wanted["lm_head.weight"] = wanted["embed_tokens.weight"]
    yield from _compare(outer, wanted, checkpoint, "")
    spellings = {kind: layer_tensors(config, index) for index in layers for kind in [has_experts(config, index)]}
    for index, found in sorted(layers.items()):
        wanted = _nearest(found, spellings[has_experts(config, index)])
        yield from _compare(found, wanted, checkpoint, f"layer {index}: ")


def _nearest(
    found: Mapping[str, TensorEntry], spellings: list[dict[str, tuple[int, ...]]]
) -> dict[str, tuple[int, ...]]:
    return min(spellings, key=lambda wanted: len(wanted.keys() ^ found.keys()))


def _compare(found: Mapping[str, TensorEntry], wanted: Shapes, checkpoint: Checkpoint, where: str) -> Iterator[str]:
    for name in wanted.keys() - found.keys():
        yield f"{where}{name} {list(wanted[name])} is missing"
    for name, entry in found.items():
        if name in wanted and entry.shape != wanted[name]:
            file = checkpoint.file_of(entry.name)
            yield f"{file}: {entry.name} is {list(entry.shape)}, wanted {list(wanted[name])}"
        if name not in wanted and not _is_computed(name):
            yield f"{checkpoint.file_of(entry.name)}: {described(entry.name)} belongs to no part of the model"


def _by_layer(entries: Mapping[str, TensorEntry]) -> tuple[dict[int, dict[str, TensorEntry]], dict[str, TensorEntry]]:
    """Tensors of each layer, by their name in it, and the others, by their name without the model's prefix."""
    layers: dict[int, dict[str, TensorEntry]] = defaultdict(dict)
    outer: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        match = _LAYER.fullmatch(name)
        part, own = (layers[int(match[1])], match[2]) if match else (outer, name.removeprefix("model."))
        # Under both prefixes at once, the second one is an extra.
        part[name if own in part else own] = entry
    return layers, outer


def _is_computed(name: str) -> bool:
    """A buffer that old checkpoints carry and the model makes itself."""
    return name.endswith("rotary_emb.inv_freq")


def _span(layers: Mapping[int, object]) -> str:
    return f"{min(layers)} to {max(layers)}, {len(layers)} of them" if layers else "none"
