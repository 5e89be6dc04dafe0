"""The shape of a checkpoint folder. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.checkpoint.gguf_file import GgufCheckpoint, is_gguf
from ...offload.checkpoint.header import TensorEntry, described
from ...offload.errors import BadCheckpoint
from ...offload.memory import gc_paused
from ...quant.formats.format import DTYPES
from ..settings.errors import UnsupportedModel
from .config import ModelConfig, head_dim, kv_heads, latent_size
from .families import JOINED, SHARING, TEXT_AND_PICTURES, text_name
from .gguf import gguf_config
from .gguf_tensors import gguf_tensors
from .model_shape import ModelShape
from .mtp import check_head, count_head
from .quantized import ModelTensors
from .read import Tensors, by_layer, divided, expert_index, is_expert, is_unused, model_shape, tensors_of

_FLOATS = {each.safetensors for each in DTYPES.values() if "float" in each.name}
# Buffers that old checkpoints carry and models make themselves.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
_MOST_SHOWN = 10
# Of parts that only predict further tokens (MTP) and have layers of their own.
PREDICTING = "mtp."


def check_tensors(
    config: ModelConfig, checkpoint: Checkpoint, tensors: Tensors, entries: Mapping[str, TensorEntry] | None = None
) -> None:
    """`tensors` are the checkpoint's, by layer, and `entries` all of them, if they are not those of the files.

    Raises BadCheckpoint, with the first ten differences, unless the tensors can be those of the config's model.
    """
    layers = tensors.layers
    num_layers = config.size("num_hidden_layers")
    if sorted(layers) != list(range(num_layers)):
        raise BadCheckpoint(
            f"{checkpoint.folder}: the files hold layers {_span(layers)}, "
            f"config.json wants num_hidden_layers {num_layers}"
        )
    differences = [*_unusable(checkpoint, entries or checkpoint.entries), *_outer(config, tensors.outside)]
    for index, layer in sorted(layers.items()):
        differences += [
            f"layer {index}: {text}" for text in (*_attention(config, index, layer), *_expert_mismatches(config, layer))
        ]
    if differences:
        more = f"; and {len(differences) - _MOST_SHOWN} more" if len(differences) > _MOST_SHOWN else ""
        raise BadCheckpoint(
            f"{checkpoint.folder}: config.json and the tensors disagree: {'; '.join(differences[:_MOST_SHOWN])}{more}"
        )


def _unusable(checkpoint: Checkpoint, entries: Mapping[str, TensorEntry]) -> Iterator[str]:
    for name, entry in entries.items():
        if entry.dtype not in _FLOATS and not _COMPUTED.search(name) and not is_unused(name):
            yield f"{checkpoint.file_of(name)}: {described(name)} is {entry.dtype}, wanted one of {sorted(_FLOATS)}"


def _outer(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    wanted = (config.size("vocab_size"), config.size("hidden_size"))
    by_suffix = {_today(name): entry for name, entry in tensors.items()}
    names = ["embed_tokens.weight"] if config.get("tie_word_embeddings") else ["embed_tokens.weight", "lm_head.weight"]
    for name in names:
        if name not in by_suffix:
            yield f"{name} {list(wanted)} is missing"
        else:
            yield from _compare(by_suffix[name], wanted)


def _today(name: str) -> str:
    """The name without its prefix that most families give to a tensor outside of layers."""
    inner = name.removeprefix("model.").removeprefix("backbone.").removeprefix("word_")
    return inner.replace("embeddings.weight", "embed_tokens.weight")


def _attention(config: ModelConfig, layer: int, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """The cache is sized by the config: its keys must be as wide as the files make them."""
    for name, entry in tensors.items():
        if config.is_latent and name.endswith("kv_a_proj_with_mqa.weight"):
            width = head_dim(config, layer) + latent_size(config, layer, "qk_rope_head_dim")
            yield from _compare(entry, (width, config.size("hidden_size")))
    key = tensors.get("self_attn.k_proj.weight")
    if key is not None and not config.is_latent:
        # Values may be longer than keys, and decide the cache then; the keys' own width is what the file shows.
        size = config.get("head_dim") if config.get("v_head_dim") else head_dim(config, layer)
        yield from _compare(key, (kv_heads(config, layer) * size, config.size("hidden_size")))


def _expert_mismatches(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    single = {index for name in tensors if (index := expert_index(name)) is not None}
    stacked = {entry.shape[0] for name, entry in tensors.items() if len(entry.shape) == 3 and is_expert(name, entry)}
    found = stacked or ({len(single)} if single else set())
    if found and found != {config.num_experts}:
        yield f"the files hold {sorted(found)} experts, wanted {config.num_experts}"


def _compare(entry: TensorEntry, wanted: tuple[int, ...]) -> Iterator[str]:
    if entry.shape != wanted:
        yield f"{entry.name} is {list(entry.shape)}, wanted {list(wanted)}"


def _span(layers: Mapping[int, object]) -> str:
    return f"{min(layers)} to {max(layers)}, {len(layers)} of them" if layers else "none"


def read_shape(folder: Path, *, mtp: bool = False) -> ModelShape:
    """The shape of a checkpoint, a folder or a GGUF file, from its config and headers, if they agree; reads no weight.

    With `mtp` the last layer is its head that drafts tokens. Raises UnsupportedModel for what cannot run here,
    BadCheckpoint for what is damaged, incomplete or contradictory.
    """
    config = read_config(folder)
    if mtp:
        count_head(config)
    with gc_paused(), open_checkpoint(config, folder) as checkpoint:
        found = read_tensors(config, checkpoint)
        tensors = by_layer(config, found.entries)
        if mtp:
            check_head(config, tensors.layers)
        check_tensors(config, checkpoint, tensors, found.entries)
        return model_shape(config, found, tensors)


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint folder or of a GGUF file. Raises UnsupportedModel, BadCheckpoint."""
    if not is_gguf(folder):
        return ModelConfig.read(folder)
    values = gguf_values(folder)
    try:
        return ModelConfig(values)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{folder}: as {error}") from None


def gguf_values(path: Path) -> dict[str, Any]:
    """What config.json would say of the model in a GGUF file. Raises UnsupportedModel, BadCheckpoint."""
    with gc_paused(), GgufCheckpoint(path) as checkpoint:
        try:
            return gguf_config(checkpoint.metadata, checkpoint.entries, partial(_read_small, checkpoint))
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None


def _read_small(checkpoint: Checkpoint, name: str) -> bytes:
    data = bytearray(checkpoint.entries[name].nbytes)
    checkpoint.read_into(name, memoryview(data))
    return bytes(data)


def open_checkpoint(config: ModelConfig, folder: Path) -> Checkpoint:
    """The tensors of a folder's text model, under its names, or those of a GGUF file. Raises BadCheckpoint."""
    if is_gguf(folder):
        return GgufCheckpoint(folder)
    checkpoint = Checkpoint(folder)
    if config.multimodal:
        checkpoint.select(text_name)
    elif any(name.startswith(PREDICTING) for name in checkpoint.entries):
        checkpoint.select(lambda name: None if name.startswith(PREDICTING) else name)
    if config.family.model_type in {*JOINED, *SHARING, TEXT_AND_PICTURES}:
        checkpoint.divide(partial(divided, config))
    return checkpoint


def read_tensors(config: ModelConfig, checkpoint: Checkpoint) -> ModelTensors:
    """A checkpoint's tensors as a model has them, quantized or not. Raises BadCheckpoint, UnsupportedModel."""
    try:
        if isinstance(checkpoint, GgufCheckpoint):
            return gguf_tensors(config, checkpoint.entries)
        return tensors_of(config, checkpoint.entries, partial(_read_small, checkpoint))
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{checkpoint.folder}: {error}") from None
