"""A model from its config and headers alone: of a folder, or of a hub repository of which nothing else is fetched.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..offload.checkpoint.header import TensorEntry
from ..offload.store.manifest import MANIFEST, read_manifest
from .errors import ModelNotFound
from .hub import local_folder, repository_of
from .model_source import is_store
from .plan.plan import Settings
from .shape.as_json import shape_from_json
from .shape.config import ModelConfig
from .shape.folder import read_shape
from .shape.model_shape import ModelShape
from .shape.read import model_shape


@dataclass(frozen=True, slots=True)
class Headers:
    """`folder` is None for a model of which nothing is here; `recipe` is what a store has decided already."""

    name: str
    shape: ModelShape
    folder: Path | None
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def settle(self, settings: Settings) -> Settings:
        return replace(settings, **{name: self.recipe[name] for name in ("quant", "dtype") if name in self.recipe})


def read_headers(name: str) -> Headers:
    """Of a folder, a store, a checkpoint in the hub's cache, or the hub.

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
        raise ModelNotFound(f"{name!r} is no folder here, and its headers could not be read: {reason}") from None
    entries = {
        tensor: TensorEntry(tensor, info.dtype, tuple(info.shape), *info.data_offsets)
        for file in metadata.files_metadata.values()
        for tensor, info in file.tensors.items()
    }
    return model_shape(ModelConfig.read(Path(config).parent), entries)
