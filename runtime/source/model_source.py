"""Opens the MODEL of a command: a checkpoint folder, a hub repository, or prepared weights; or reads only its config
and headers, and downloads nothing else.

Torch-free but for stores, whose small files are read with it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...offload.checkpoint.checkpoint import (
    INDEX,
    MAX_INDEX_NBYTES,
    SINGLE,
    blob_id,
    find_inside,
    has_weights,
    open_inside,
    read_header,
    read_index,
    read_inside,
)
from ...offload.checkpoint.gguf_file import is_gguf, read_gguf_header, split_files
from ...offload.checkpoint.header import TensorEntry, load_object
from ...offload.errors import BadCheckpoint, BadStore
from ...offload.store.manifest import MANIFEST, read_manifest
from ...offload.store.stores import store_folder
from ...quant.formats.format import FORMATS, MIXED_FORMATS, get_format
from ...quant.kv.format import KV_FORMATS
from ..kv.spec import KVSpec, StateSpec
from ..settings.errors import ModelNotFound, SettingError, UnsupportedModel
from ..settings.settings import Settings
from ..shape.checkpoint_shape import gguf_values, read_shape
from ..shape.config import CONFIG, MAX_CONFIG_NBYTES, ModelConfig
from ..shape.families import text_name
from ..shape.formula import is_worked_out, shape_of_config
from ..shape.model_shape import ModelShape, shape_from_json
from ..shape.mtp import count_head
from ..shape.read import model_shape
from ..shape.shards import all_formats, as_found, checkpoint_nbytes, weights_nbytes
from .hub import download_space, find_model, hub_reason, is_reachable, local_folder, repository_of

if TYPE_CHECKING:
    from ...offload.store.store import Store


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`folder` has config and tokenizer, and the weights too unless there is a `store` or a file `gguf`.

    `recipe` has `quant`, `dtype` and `layout`, the order of codes, of a store.
    """

    name: str
    folder: Path
    shape: ModelShape
    store: Path | None = None
    gguf: Path | None = None
    recipe: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> Path:
        """The folder or the GGUF file that holds the checkpoint."""
        return self.gguf or self.folder

    @property
    def config(self) -> ModelConfig:
        """The configuration of the model that `shape` describes, its MTP head included if that has one."""
        config = ModelConfig.read(self.folder)
        if self.shape.mtp:
            count_head(config)
        return config

    def speculating(self, settings: Settings) -> ModelSource:
        """The source with its MTP head where settings want it. Raises UnsupportedModel where there is none,
        SettingError for a store that was prepared without."""
        if settings.speculate != "mtp" or self.shape.mtp:
            return self
        if self.store is not None:
            raise SettingError(
                f"{self.store} was prepared without an MTP head; give the checkpoint, or another speculate"
            )
        return replace(self, shape=read_shape(self.weights, mtp=True))

    def settle(self, settings: Settings) -> Settings:
        """Settings with what a store has decided already. Raises SettingError where the user wants something else."""
        if self.store is None:
            return settings
        for option, wanted in (("quant", settings.quant), ("dtype", settings.dtype)):
            if as_found(wanted, self.recipe[option]) != self.recipe[option]:
                raise SettingError(
                    f"{self.store} was prepared with --{option} {self.recipe[option]}, and --{option} {wanted} was "
                    "asked for; drop the option, or give the checkpoint"
                )
        return replace(settings, quant=self.recipe["quant"], dtype=self.recipe["dtype"])


def public_name(name: str) -> str:
    """What answers call the model: an id of the Hub as it is, of a path its last part."""
    return Path(name).resolve().name if Path(name).exists() else name


@contextmanager
def open_source(name: str, tokenizer: bool = True) -> Iterator[ModelSource]:
    """Finds MODEL; the small files of a store or a GGUF file are laid out in a temporary folder meanwhile.

    Without `tokenizer`, that of a GGUF file is not among them.
    """
    folder = find_model(name)
    if is_gguf(folder):
        with small_files(folder, tokenizer) as small:
            yield ModelSource(name, small, read_shape(folder), gguf=folder)
        return
    if not is_store(folder):
        yield ModelSource(name, folder, read_shape(folder))
        return
    from ...offload.store.store import Store
    from .stored_model import extract_files

    with tempfile.TemporaryDirectory(prefix="moedge-") as small:
        with Store.open(folder) as store:
            extract_files(store, Path(small))
            shape = shape_from_json(dict(store.manifest.extra["shape"]))
        yield ModelSource(name, Path(small), shape, folder, recipe=_recipe(store))


@contextmanager
def small_files(folder: Path, tokenizer: bool = True) -> Iterator[Path]:
    """The folder with the small files of a checkpoint: its own, or a temporary one for those inside a GGUF file."""
    if not is_gguf(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="moedge-") as small:
        Path(small, CONFIG).write_text(json.dumps(gguf_values(folder)))
        if tokenizer:
            from ..text.gguf_tokenizer import write_tokenizer

            write_tokenizer(folder, Path(small))
        yield Path(small)


def is_store(folder: Path) -> bool:
    """Whether a folder holds prepared weights, finished or not, instead of a checkpoint."""
    return any((folder / name).is_file() for name in ("manifest.json", "progress.json"))


def _recipe(store: Store) -> dict[str, str]:
    quant, dtype, layout = (str(store.manifest.recipe.get(name)) for name in ("quant", "dtype", "layout"))
    known = quant in FORMATS or quant in MIXED_FORMATS
    others = known and store.manifest.recipe.get("planes") != recipe(quant, dtype, layout).get("planes")
    if not known or others or layout not in get_format(quant).orders:
        wanted = f"layout {get_format(quant).order!r}" if known and not others else "a format of this version"
        raise BadStore(
            f"{store.folder}: weights in format {quant!r:.40}, layout {layout!r:.40}, were found, {wanted} is wanted;"
            " prepare the model again"
        )
    return {"quant": quant, "dtype": dtype, "layout": layout}


# By format, the number of what its stores have held, where there may be others: other planes, no head that is tied.
_PLANES = {"int8": 2, "int4": 3, "nf4": 2, "mxfp4": 2}


def recipe(quant: str, dtype: str, layout: str, linked: bool = False, mtp: bool = False) -> Mapping[str, Any]:
    """Everything beside the checkpoint that decides the bytes of a store; `layout` is the order of codes.

    `linked`: what lies in the checkpoint's files as it is packed is named there and not copied. `mtp`: with its head.
    """
    made_of: dict[str, Any] = {"quant": quant, "dtype": dtype, "layout": layout} | ({"mtp": True} if mtp else {})
    planes = _PLANES.get(get_format(quant).parts[0])
    return made_of | ({"planes": planes} if planes else {}) | ({"linked": True} if linked else {})


def prepared_nbytes(
    name: str,
    folder: Path,
    formats: tuple[str, ...],
    dtype: str,
    root: Path,
    stores: Mapping[str, int],
    mtp: bool = False,
) -> dict[str, int]:
    """By weight format, the bytes of what is prepared, finished or not, of the checkpoint in `folder`; with its `mtp`
    head or without.

    `stores` are the bytes of the stores in `root`, by folder name. A store that names the checkpoint's own files counts
    with all bytes that it names.
    """
    if not stores:
        return {}
    fingerprint = model_fingerprint(folder)
    # Which order of codes this machine wants is not known without torch; hardly any has stores in two.
    found: dict[str, int] = {}
    for quant, layout in ((each, layout) for each in formats for layout in get_format(each).orders):
        there = store_folder(root, name, fingerprint, recipe(quant, dtype, layout, mtp=mtp)).name
        if there in stores:
            found[quant] = max(stores[there], found.get(quant, 0))
    linked = store_folder(root, name, fingerprint, recipe("none", dtype, get_format("none").order, True, mtp))
    with suppress(FileNotFoundError, BadStore):
        found["none"] = max(found.get("none", 0), read_manifest(linked / MANIFEST).nbytes_named)
    return found


def model_fingerprint(folder: Path) -> str:
    """sha256 (hex) over config.json, and every weight file's name, size, header and, from a hub cache, blob id; of a
    GGUF file, over the same of all its parts.

    An edit of a weight in place is seen only where blob ids are: all bytes of a large model take minutes to hash.
    Raises BadCheckpoint.
    """
    digest = sha256()
    for part in _parts(folder):
        # The length in front of every part keeps two parts from passing for one.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(folder: Path) -> Iterator[bytes]:
    if is_gguf(folder):
        yield from _gguf_parts(folder)
        return
    yield read_inside(folder, CONFIG, MAX_CONFIG_NBYTES)
    index = read_index(folder)
    for file in [SINGLE] if index is None else sorted(set(index.values())):
        descriptor = open_inside(folder, file)
        try:
            header, file_nbytes = read_header(descriptor, file)
        finally:
            os.close(descriptor)
        yield file.encode()
        yield header
        yield file_nbytes.to_bytes(8, "little")
        yield (blob_id(folder, file) or "").encode()


def _gguf_parts(path: Path) -> Iterator[bytes]:
    for file in split_files(path.name):
        descriptor = open_inside(path.parent, file)
        try:
            header_nbytes = read_gguf_header(descriptor, file).nbytes
            yield file.encode()
            yield os.pread(descriptor, header_nbytes, 0)
            yield os.fstat(descriptor).st_size.to_bytes(8, "little")
        finally:
            os.close(descriptor)
        yield (blob_id(path.parent, file) or "").encode()


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

    def speculating(self, settings: Settings) -> Headers:
        """The headers with those of the MTP head where settings want it. Raises UnsupportedModel, SettingError."""
        if settings.speculate != "mtp" or self.shape.mtp:
            return self
        if self.folder is None or self.recipe:
            raise SettingError("speculate mtp is planned from the files of a checkpoint; give its folder")
        return replace(self, shape=read_shape(self.folder, mtp=True))

    def headed(self, settings: Settings) -> Headers | None:
        """The headers with those of an MTP head where settings leave open whether it drafts, and there is one."""
        if settings.speculate != "auto" or self.shape.mtp or self.folder is None or self.recipe:
            return None
        with suppress(UnsupportedModel):
            return replace(self, shape=read_shape(self.folder, mtp=True))
        return None

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
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if not is_reachable():
            raise LocalEntryNotFoundError(name)
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
