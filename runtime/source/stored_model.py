"""What a store keeps of a model beside packed shards: resident parameters, and the small files of its checkpoint.

A prepared store opens without its checkpoint. Knows what is in it; where stores lie and what they may take is
`loading/prepare.py`'s business.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ...offload.checkpoint.checkpoint import read_inside
from ...offload.store.manifest import RESIDENT_FILE, LinkedShard, LinkedTensor
from ...offload.store.shard_file import read_shard
from ...offload.store.store import Store
from ...offload.store.writer import StoreWriter, TensorSpec
from ...quant.tensor import SAFETENSORS_DTYPES
from ..settings.errors import UnsupportedModel
from ..text.folder import SMALL_FILES

FILE_PREFIX = "file:"
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


# Finds a tensor's bytes, by its name, in the checkpoint's files.
FindLinked = Callable[[str, memoryview], LinkedShard | None]


def carried_files(folder: Path) -> dict[str, Path]:
    """The small files of a checkpoint that travel with its weights, by the names that they have as resident tensors."""
    return {FILE_PREFIX + name: folder / name for name in SMALL_FILES if os.path.lexists(folder / name)}


def write_resident(
    writer: StoreWriter, model: PreTrainedModel, folder: Path, find: FindLinked = lambda name, data: None
) -> None:
    """The parameters that are not packed, and the checkpoint's small files; what `find` finds is named, not copied."""
    if writer.has(RESIDENT_FILE):
        return
    tensors = {name: parameter.detach().contiguous() for name, parameter in _resident_tensors(model)}
    for name, path in carried_files(folder).items():
        data = read_inside(folder, path.name, SMALL_FILES[path.name])
        tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    specs = {name: TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    found = {name: find(name, _view(tensor)) for name, tensor in tensors.items()}
    linked = {
        name: LinkedTensor(specs[name].dtype, specs[name].shape, (shard,)) for name, shard in found.items() if shard
    }
    with writer.resident([spec for name, spec in specs.items() if name not in linked]) as file:
        for name, tensor in tensors.items():
            if name not in linked:
                file.write(name, 0, _view(tensor))
        file.linked.update(linked)


def read_resident(store: Store, model: PreTrainedModel) -> None:
    """Gives a meta model its resident parameters. Raises UnsupportedModel where the store has other ones."""
    wanted = dict(_resident_tensors(model))
    stored = {name: tensor for name, tensor in store.resident.items() if not name.startswith(FILE_PREFIX)}
    if wanted.keys() != stored.keys():
        different = sorted(wanted.keys() ^ stored.keys())[:3]
        raise UnsupportedModel(
            f"{store.folder} and the model differ in resident parameters {different}; prepare it again"
        )
    for name, tensor in stored.items():
        value = torch.empty(tensor.shape, dtype=SAFETENSORS_DTYPES[tensor.dtype])
        read_shard(tensor.extent, _view(value))
        path, _, attribute = name.rpartition(".")
        is_parameter = isinstance(wanted[name], nn.Parameter)
        setattr(
            model.get_submodule(path), attribute, nn.Parameter(value, requires_grad=False) if is_parameter else value
        )
    model.tie_weights()


def extract_files(store: Store, folder: Path) -> None:
    """Writes the checkpoint's small files into `folder`."""
    for name, tensor in store.resident.items():
        if name.startswith(FILE_PREFIX) and name.removeprefix(FILE_PREFIX) in SMALL_FILES:
            data = bytearray(tensor.extent.nbytes)
            read_shard(tensor.extent, memoryview(data))
            (folder / name.removeprefix(FILE_PREFIX)).write_bytes(data)


def _resident_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that are not packed, and buffers that checkpoints hold, such as routers' corrections.

    A tied head is its embedding, an untied one has a shard of its own.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    packed = head.weight if isinstance(head, nn.Linear) and head.weight is not embedding else None
    for name, parameter in model.named_parameters():
        if parameter is not packed:
            yield name, parameter
    kept = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _view(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data
