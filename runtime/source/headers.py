"""Reads a model from its config and headers, in a folder or a hub repository; downloads nothing else.

Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...offload.checkpoint.header import TensorEntry
from ...offload.store.manifest import MANIFEST, read_manifest
from ...quant.kv.format import KV_FORMATS
from ..kv.spec import KVSpec
from ..settings.errors import ModelNotFound
from ..settings.settings import Settings
from ..shape.checkpoint_shape import read_shape
from ..shape.config import ModelConfig
from ..shape.model_shape import ModelShape, shape_from_json
from ..shape.read import model_shape
from ..shape.shards import FORMATS, weights_nbytes
from .hub import local_folder, repository_of
from .model_source import is_store


@dataclass(frozen=True, slots=True)
class Headers:
    """`folder` is None for a model that is not in the local cache; `recipe` holds the formats of prepared weights."""

    name: str
    shape: ModelShape
    folder: Path | None
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def settle(self, settings: Settings) -> Settings:
        return replace(settings, **{name: self.recipe[name] for name in ("quant", "dtype") if name in self.recipe})


def read_headers(name: str) -> Headers:
    """Reads the headers of a folder, prepared weights, a checkpoint in the hub's cache, or a hub repository.

    Raises ModelNotFound, UnsupportedModel, BadCheckpoint, BadStore.
    """
    folder = local_folder(name)
    if folder is None:
        return Headers(name, _on_hub(name), None)
    if not is_store(folder):
        return Headers(name, read_shape(folder), folder)
    manifest = read_manifest(folder / MANIFEST)
    return Headers(name, shape_from_json(dict(manifest.extra["shape"])), folder, manifest.recipe)


def _on_hub(name: str) -> ModelShape:
    repository, revision = repository_of(name)
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    try:
        config = hf_hub_download(repository, "config.json", revision=revision)
        metadata = get_safetensors_metadata(repository, revision=revision)
    # As in hub.py: whatever its HTTP client or its parser raises.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise ModelNotFound(f"{name!r} is not a local folder, and its headers could not be read: {reason}") from None
    entries = {
        tensor: TensorEntry(tensor, info.dtype, tuple(info.shape), *info.data_offsets)
        for file in metadata.files_metadata.values()
        for tensor, info in file.tensors.items()
    }
    return model_shape(ModelConfig.read(Path(config).parent), entries)


@dataclass(frozen=True, slots=True)
class Description:
    """`weights` and `kv_per_token` are bytes by format."""

    model_type: str
    parameters: int
    active_parameters: int
    layers: int
    experts: int
    context: int
    weights: dict[str, int]
    kv_per_token: dict[str, float]

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
        weights={quant: weights_nbytes(shape, quant, shape.dtype) for quant in FORMATS},
        kv_per_token={name: sum(KVSpec(group, name).token_nbytes for group in shape.kv_groups) for name in KV_FORMATS},
    )
