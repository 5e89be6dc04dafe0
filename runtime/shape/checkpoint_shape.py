"""The shape of a checkpoint folder. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.checkpoint.header import TensorEntry
from ...offload.checkpoint.json_object import described, gc_paused
from ...offload.errors import BadCheckpoint
from ...quant.formats.dtypes import DTYPES
from .config import ModelConfig, head_dim, kv_heads
from .model_shape import ModelShape
from .read import Tensors, by_layer, expert_index, model_shape

_FLOATS = {each.safetensors for each in DTYPES.values() if "float" in each.name}
# Buffers that old checkpoints carry and models make themselves.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
_MOST_SHOWN = 10


def check_tensors(config: ModelConfig, checkpoint: Checkpoint, tensors: Tensors) -> None:
    """`tensors` are the checkpoint's, by layer.

    Raises BadCheckpoint, with the first ten differences, unless the tensors can be those of the config's model.
    """
    layers = tensors.layers
    num_layers = config.size("num_hidden_layers")
    if sorted(layers) != list(range(num_layers)):
        raise BadCheckpoint(
            f"{checkpoint.folder}: the files hold layers {_span(layers)}, "
            f"config.json wants num_hidden_layers {num_layers}"
        )
    differences = [*_unusable(checkpoint), *_outer(config, tensors.outside)]
    for index, layer in sorted(layers.items()):
        differences += [
            f"layer {index}: {text}" for text in (*_attention(config, index, layer), *_experts(config, layer))
        ]
    if differences:
        more = f"; and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
        raise BadCheckpoint(
            f"{checkpoint.folder}: config.json and the tensors disagree: {'; '.join(differences[:_MOST_SHOWN])}{more}"
        )


def _unusable(checkpoint: Checkpoint) -> Iterator[str]:
    for name, entry in checkpoint.entries.items():
        if entry.dtype not in _FLOATS and not _COMPUTED.search(name):
            yield f"{checkpoint.file_of(name)}: {described(name)} is {entry.dtype}, wanted one of {sorted(_FLOATS)}"


def _outer(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    wanted = (config.size("vocab_size"), config.size("hidden_size"))
    by_suffix = {name.removeprefix("model."): entry for name, entry in tensors.items()}
    names = ["embed_tokens.weight"] if config.get("tie_word_embeddings") else ["embed_tokens.weight", "lm_head.weight"]
    for name in names:
        if name not in by_suffix:
            yield f"{name} {list(wanted)} is missing"
        else:
            yield from _compare(by_suffix[name], wanted)


def _attention(config: ModelConfig, layer: int, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """The cache is sized by the config: its keys must be as wide as the files make them."""
    for name, entry in tensors.items():
        if config.is_latent and name.endswith("kv_a_proj_with_mqa.weight"):
            width = head_dim(config, layer) + config.size("qk_rope_head_dim")
            yield from _compare(entry, (width, config.size("hidden_size")))
    key = tensors.get("self_attn.k_proj.weight")
    if key is not None:
        # Values may be longer than keys, and decide the cache then; the keys' own width is what the file shows.
        size = config.get("head_dim") if config.get("v_head_dim") else head_dim(config, layer)
        yield from _compare(key, (kv_heads(config, layer) * size, config.size("hidden_size")))


def _experts(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    single = {index for name in tensors if (index := expert_index(name)) is not None}
    stacked = {entry.shape[0] for entry in tensors.values() if len(entry.shape) == 3}
    found = stacked or ({len(single)} if single else set())
    if found and found != {config.num_experts}:
        yield f"the files hold {sorted(found)} experts, wanted {config.num_experts}"


def _compare(entry: TensorEntry, wanted: tuple[int, ...]) -> Iterator[str]:
    if entry.shape != wanted:
        yield f"{entry.name} is {list(entry.shape)}, wanted {list(wanted)}"


def _span(layers: Mapping[int, object]) -> str:
    return f"{min(layers)} to {max(layers)}, {len(layers)} of them" if layers else "none"


def read_shape(folder: Path) -> ModelShape:
    """The shape of a checkpoint from its config and headers, if they agree; reads no weight.

    Raises UnsupportedModel for what cannot run here, BadCheckpoint for what is damaged, incomplete or contradictory.
    """
    config = ModelConfig.read(folder)
    with gc_paused(), Checkpoint(folder) as checkpoint:
        tensors = by_layer(config, checkpoint.entries)
        check_tensors(config, checkpoint, tensors)
        return model_shape(config, checkpoint.entries, tensors)
