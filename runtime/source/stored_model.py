"""What a store keeps of a model beside packed shards: resident parameters, and the small files of its checkpoint.

A prepared store opens without its checkpoint. Knows what is in it; where stores lie and what they may take is
`loading/prepare.py`'s business.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...offload.checkpoint.checkpoint import read_inside
from ...offload.errors import BadStore
from ...offload.store.manifest import RESIDENT_FILE, LinkedShard, LinkedTensor
from ...offload.store.shard_file import ShardExtent, damage, is_sound, read_rows, read_shard
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


class StoredEmbedding(nn.Module):
    """An embedding [V, D] whose rows are read from the disk as passes gather them: thousands of tokens, not all.

    `inner` computes with them: some models scale what they look up.
    """

    def __init__(self, inner: nn.Embedding, extent: ShardExtent, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self._extent = extent
        self._shape, self._dtype = inner.weight.shape, dtype
        inner.weight = nn.Parameter(torch.empty(0, self._shape[1], dtype=dtype), requires_grad=False)
        # It would be an index of all rows.
        inner.padding_idx = None

    @property
    def weight(self) -> Any:
        """The rows of the last pass; models ask for their dtype and device."""
        return self.inner.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        wanted, places = torch.unique(token_ids, return_inverse=True)
        if len(wanted) and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self._shape[0]:
            raise IndexError(f"token ids from {wanted[0]} to {wanted[-1]}, wanted 0 to {self._shape[0] - 1}")
        rows = torch.empty(len(wanted), self._shape[1], dtype=self._dtype)
        read_rows(self._extent, wanted.tolist(), self._shape[1] * self._dtype.itemsize, _view(rows))
        self.inner.weight = nn.Parameter(rows, requires_grad=False)
        found: torch.Tensor = self.inner(places)
        return found


def read_resident(store: Store, model: PreTrainedModel, *, tied: bool, rows_from_disk: bool) -> None:
    """Gives a meta model, whose head may be `tied`, its resident parameters; with `rows_from_disk`, embeddings that
    only look up stay there.

    Raises UnsupportedModel where the store has other ones, BadStore.
    """
    wanted = dict(_resident_tensors(model))
    stored = {name: tensor for name, tensor in store.resident.items() if not name.startswith(FILE_PREFIX)}
    if wanted.keys() != stored.keys():
        different = sorted(wanted.keys() ^ stored.keys())[:3]
        raise UnsupportedModel(
            f"{store.folder} and the model differ in resident parameters {different}; prepare it again"
        )
    # A tied head multiplies by all rows.
    whole = model.get_input_embeddings() if tied else None
    for name, tensor in stored.items():
        path, _, attribute = name.rpartition(".")
        module, extent = model.get_submodule(path), tensor.extent
        looked_up = isinstance(module, nn.Embedding) and module is not whole
        if rows_from_disk and looked_up and len(extent.parts) == 1:
            if not is_sound(extent):
                raise BadStore(damage(extent))
            model.set_submodule(path, StoredEmbedding(module, extent, SAFETENSORS_DTYPES[tensor.dtype]))
            continue
        value = torch.empty(tensor.shape, dtype=SAFETENSORS_DTYPES[tensor.dtype])
        read_shard(extent, _view(value))
        is_parameter = isinstance(wanted[name], nn.Parameter)
        setattr(module, attribute, nn.Parameter(value, requires_grad=False) if is_parameter else value)
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
