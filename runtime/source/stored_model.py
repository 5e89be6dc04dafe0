"""What a store keeps of a model beside packed shards: resident parameters, and the small files of its checkpoint.

A prepared store opens without its checkpoint. Knows what is in it; where stores lie and what they may take is
`loading/prepare.py`'s business.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...offload.checkpoint.checkpoint import Checkpoint, read_inside
from ...offload.checkpoint.header import TensorEntry
from ...offload.errors import BadStore
from ...offload.store.manifest import RESIDENT_FILE, LinkedShard, LinkedTensor
from ...offload.store.shard_file import damage, is_sound, read_shard
from ...offload.store.store import Store
from ...offload.store.writer import StoreWriter, TensorSpec
from ...offload.stream.rows import TablePart, TableReader
from ...quant.tensor import SAFETENSORS_DTYPES
from ..model import PreTrainedModel
from ..settings.errors import UnsupportedModel
from ..shape.read import table_part
from ..shape.shards import POPULAR_NBYTES
from ..text.folder import SMALL_FILES

FILE_PREFIX = "file:"
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_CHUNK_NBYTES = 4 << 20


class FindsLinked(Protocol):
    """Finds bytes in the checkpoint's files (weights/linking.py)."""

    def find_resident(self, name: str, data: memoryview) -> LinkedShard | None:
        """Where `data`, a tensor under that name, lies; None where it does not."""

    def link_whole(self, names: Sequence[str]) -> LinkedShard:
        """The shard that tensors of the files make one behind the other."""


def carried_files(folder: Path) -> dict[str, Path]:
    """The small files of a checkpoint that travel with its weights, by the names that they have as resident tensors."""
    return {FILE_PREFIX + name: folder / name for name in SMALL_FILES if os.path.lexists(folder / name)}


def write_resident(
    writer: StoreWriter, model: PreTrainedModel, checkpoint: Checkpoint, folder: Path, linker: FindsLinked | None = None
) -> None:
    """The parameters that are not packed, tables, and the checkpoint's small files; what `linker` finds is named, not
    copied."""
    if writer.has(RESIDENT_FILE):
        return
    tables = table_tensors(checkpoint)
    tensors = {name: each.detach().contiguous() for name, each in _resident_tensors(model) if name not in tables}
    for name, path in carried_files(folder).items():
        data = read_inside(folder, path.name, SMALL_FILES[path.name])
        tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    specs = {name: TensorSpec(name, _NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    specs |= {name: _table_spec(name, [checkpoint.entries[part] for part in parts]) for name, parts in tables.items()}
    found: dict[str, LinkedShard | None] = {}
    if linker is not None:
        found = {name: linker.find_resident(name, _view(tensor)) for name, tensor in tensors.items()}
        found |= {name: linker.link_whole(parts) for name, parts in tables.items()}
    linked = {
        name: LinkedTensor(specs[name].dtype, specs[name].shape, (shard,)) for name, shard in found.items() if shard
    }
    with writer.resident([spec for name, spec in specs.items() if name not in linked]) as file:
        for name, tensor in tensors.items():
            if name not in linked:
                file.write(name, 0, _view(tensor))
        for name in tables.keys() - linked.keys():
            for part in tables[name]:
                _copy_whole(checkpoint, part, partial(file.write, name, 0))
        file.linked.update(linked)


def _table_spec(name: str, parts: Sequence[TensorEntry]) -> TensorSpec:
    return TensorSpec(name, parts[0].dtype, (sum(each.shape[0] for each in parts), parts[0].shape[1]))


def _copy_whole(checkpoint: Checkpoint, name: str, write: Callable[[memoryview], None]) -> None:
    nbytes = checkpoint.entries[name].nbytes
    for begin in range(0, nbytes, _CHUNK_NBYTES):
        chunk = memoryview(bytearray(min(_CHUNK_NBYTES, nbytes - begin)))
        checkpoint.read_into(name, chunk, begin)
        write(chunk)


class StoredEmbedding(nn.Module):
    """An embedding [V, D] whose rows are read from the disk as passes look them up: thousands of tokens, not all.

    `inner` computes with them: some models scale what they look up. `stored` is the dtype of the rows, which become
    those of `inner`.
    """

    def __init__(self, inner: nn.Embedding, parts: Sequence[TablePart], stored: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self._stored = stored
        self.reader = TableReader(parts, inner.weight.shape[1] * stored.itemsize, POPULAR_NBYTES)
        empty = torch.empty(0, inner.weight.shape[1], dtype=inner.weight.dtype)
        inner.weight = nn.Parameter(empty, requires_grad=False)
        # It would be an index of all rows.
        inner.padding_idx = None

    @property
    def weight(self) -> Any:
        """The rows of the last pass; models ask for their dtype and device."""
        return self.inner.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        wanted, places = torch.unique(token_ids.cpu(), return_inverse=True)
        rows = torch.from_numpy(self.reader.read(wanted.numpy(), places.numel())).view(self._stored)
        self.inner.weight = nn.Parameter(rows.to(self.inner.weight.dtype), requires_grad=False)
        found: torch.Tensor = self.inner(places).to(token_ids.device)
        return found


def row_readers(model: nn.Module) -> list[TableReader]:
    """The readers of a model's embeddings and tables that stay on the disk."""
    return [module.reader for module in model.modules() if isinstance(module, StoredEmbedding)]


def table_tensors(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """The tensors that hold the rows of each table that stays on the disk, in their order, by the table's parameter."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in checkpoint.entries:
        if part := table_part(name):
            found[f"{part[0]}.weight"][part[1]] = name
    return {table: [parts[index] for index in sorted(parts)] for table, parts in found.items()}


def read_tables(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Gives a model the tables that stay in its checkpoint's files."""
    for table, names in table_tensors(checkpoint).items():
        entries = [checkpoint.entries[name] for name in names]
        files = [checkpoint.folder / checkpoint.file_of(name) for name in names]
        parts = [TablePart(file, each.begin, each.shape[0]) for file, each in zip(files, entries, strict=True)]
        _keep_on_disk(model, table, parts, entries[0].dtype)


def _keep_on_disk(model: PreTrainedModel, name: str, parts: Sequence[TablePart], dtype: str) -> None:
    path = name.removesuffix(".weight")
    embedding = model.get_submodule(path)
    assert isinstance(embedding, nn.Embedding)
    if (found := sum(part.rows for part in parts)) != embedding.num_embeddings:
        raise UnsupportedModel(f"{name} has {found} rows, wanted {embedding.num_embeddings}")
    model.set_submodule(path, StoredEmbedding(embedding, parts, SAFETENSORS_DTYPES[dtype]))


def read_resident(store: Store, model: PreTrainedModel, *, tied: bool, rows_from_disk: bool) -> None:
    """Gives a meta model, whose head may be `tied`, its resident parameters; tables stay on the disk, and with
    `rows_from_disk` embeddings that only look up do.

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
        looked_up, is_table = isinstance(module, nn.Embedding) and module is not whole, table_part(name) is not None
        if is_table or (rows_from_disk and looked_up):
            # All of a table takes minutes to read: `moedge prepare` does.
            if not is_table and not is_sound(extent):
                raise BadStore(damage(extent))
            row_nbytes = extent.nbytes // tensor.shape[0]
            parts = [TablePart(part.path, part.offset, part.nbytes // row_nbytes) for part in extent.parts]
            _keep_on_disk(model, name, parts, tensor.dtype)
            continue
        value = torch.empty(tensor.shape, dtype=SAFETENSORS_DTYPES[tensor.dtype])
        read_shard(extent, _view(value))
        is_parameter = isinstance(wanted[name], nn.Parameter)
        setattr(module, attribute, nn.Parameter(value, requires_grad=False) if is_parameter else value)
    if tied:
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
