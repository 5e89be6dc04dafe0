"""Reads a model from its config and headers, in a folder or a hub repository; downloads nothing else.

Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...offload.checkpoint.checkpoint import INDEX, MAX_INDEX_NBYTES, find_inside, has_weights, read_inside
from ...offload.checkpoint.gguf_file import is_gguf
from ...offload.checkpoint.header import TensorEntry, load_object
from ...offload.errors import BadCheckpoint
from ...offload.store.manifest import MANIFEST, read_manifest
from ...quant.kv.format import KV_FORMATS
from ..kv.spec import KVSpec, StateSpec
from ..settings.errors import ModelNotFound
from ..settings.settings import Settings
from ..shape.config import CONFIG, MAX_CONFIG_NBYTES, ModelConfig
from ..shape.families import text_name
from ..shape.formula import is_worked_out, shape_of_config
from ..shape.model_shape import ModelShape, shape_from_json
from ..shape.read import model_shape, read_shape
from ..shape.shards import all_formats, checkpoint_nbytes, weights_nbytes
from .hub import download_space, hub_reason, local_folder, repository_of
from .model_source import is_store

# An index may count tensors that are not read, such as rotary tables.
MOST_DIFFERENT = 0.01


@dataclass(frozen=True, slots=True)
class Headers:
    """`folder` is None for a model whose weights are not here; `recipe` holds the formats of prepared weights.

    `on_hub` means that a job would download the checkpoint first.
    """

    name: str
    shape: ModelShape
    folder: Path | None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    on_hub: bool = False

    @property
    def download(self) -> dict[str, int] | None:
        """The `nbytes` of a checkpoint that is not here, and the bytes `free` on the disk where it would go."""
        return {"nbytes": checkpoint_nbytes(self.shape), "free": download_space()} if self.on_hub else None

    def settle(self, settings: Settings) -> Settings:
        return replace(settings, **{name: self.recipe[name] for name in ("quant", "dtype") if name in self.recipe})


def read_headers(name: str) -> Headers:
    """Reads the headers of a folder, a GGUF file, prepared weights, or a hub repository, in the hub's cache or not.

    The shape of a folder that has config.json but no weights is computed from the config, for which many families need
    transformers.

    Raises ModelNotFound, UnsupportedModel, BadCheckpoint, BadStore.
    """
    folder = local_folder(name)
    if folder is None and is_gguf(Path(name)):
        raise ModelNotFound(f"{name!r} is not in the local cache; download the file first, its headers are read here")
    if folder is None:
        return Headers(name, _on_hub(name), None, on_hub=True)
    if is_gguf(folder):
        return Headers(name, read_shape(folder), folder)
    if not is_store(folder) and not has_weights(folder):
        return Headers(name, _of_config(folder), None)
    if not is_store(folder):
        return Headers(name, read_shape(folder), folder)
    manifest = read_manifest(folder / MANIFEST)
    return Headers(name, shape_from_json(dict(manifest.extra["shape"])), folder, manifest.recipe)


def _of_config(folder: Path) -> ModelShape:
    """Raises BadCheckpoint where the folder has an index that says something else."""
    config = ModelConfig.read(folder)
    content = load_object(read_inside(folder, CONFIG, MAX_CONFIG_NBYTES))
    shapes = None
    if not is_worked_out(config):
        # Imports torch and transformers.
        from ..model.definition import stock_tensor_shapes

        shapes = stock_tensor_shapes(config)
    shape = shape_of_config(config, str(content.get("dtype") or content.get("torch_dtype") or ""), shapes)
    index, data = folder / INDEX, find_inside(folder, INDEX, MAX_INDEX_NBYTES)
    total = None if data is None else load_object(data).get("metadata", {}).get("total_size")
    if isinstance(total, int) and abs(checkpoint_nbytes(shape) - total) > MOST_DIFFERENT * total:
        raise BadCheckpoint(
            f"{index}: {total:,} bytes of weights, and config.json describes {checkpoint_nbytes(shape):,}; one of the "
            "two files is of another model"
        )
    return shape


def _on_hub(name: str) -> ModelShape:
    repository, revision = repository_of(name)
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    try:
        config = hf_hub_download(repository, CONFIG, revision=revision)
        metadata = get_safetensors_metadata(repository, revision=revision)
    # As in hub.py: whatever its HTTP client or its parser raises.
    except Exception as error:
        raise ModelNotFound(
            f"{name!r} is not a local folder, and its headers could not be read: {hub_reason(error)}"
        ) from None
    entries = {
        tensor: TensorEntry(tensor, info.dtype, tuple(info.shape), *info.data_offsets)
        for file in metadata.files_metadata.values()
        for tensor, info in file.tensors.items()
    }
    read = ModelConfig.read(Path(config).parent)
    if read.multimodal:
        entries = {own: entry._replace(name=own) for name, entry in entries.items() if (own := text_name(name))}
    return model_shape(read, entries)


@dataclass(frozen=True, slots=True)
class Description:
    """`weights` and `kv_per_token` are bytes by format, `stored` what lies in the files of a checkpoint.

    `state` are the bytes that recurrent layers keep of a sequence, however long it is. `own_code` says that the
    checkpoint names code of its own, which is not run.
    """

    model_type: str
    parameters: int
    active_parameters: int
    layers: int
    experts: int
    context: int
    weights: dict[str, int]
    kv_per_token: dict[str, float]
    state: int
    stored: list[dict[str, Any]]
    own_code: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def describe(shape: ModelShape) -> Description:
    return Description(
        model_type=shape.model_type,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        layers=len(shape.layers),
        experts=shape.num_experts,
        context=shape.context,
        weights={quant: weights_nbytes(shape, quant, shape.dtype) for quant in all_formats(shape)},
        kv_per_token={name: sum(KVSpec(group, name).token_nbytes for group in shape.kv_groups) for name in KV_FORMATS},
        state=StateSpec(shape.state_groups, shape.dtype).nbytes,
        stored=[{**asdict(each), "bits": round(each.bits, 3), "becomes": each.becomes} for each in shape.stored],
        own_code=shape.own_code,
    )
