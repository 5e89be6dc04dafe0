"""A complete store of prepared weights: the extent of every shard, checked, and locked while it is used.

Knows layers, experts, the head and resident tensors as extents; knows neither weight formats nor models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..closing import Closing
from ..errors import BadStore
from .manifest import (
    HEAD_FILE,
    MANIFEST,
    RESIDENT_FILE,
    Manifest,
    layer_file,
    lock_to_use,
    open_sources,
    read_manifest,
    refuse_untrusted,
)
from .shard_file import ShardExtent, ShardFile, is_sound, open_shard_file


@dataclass(frozen=True, slots=True)
class LayerExtents:
    """The shards of one layer. `dense` is None if it has none; experts are adjacent and have one size."""

    dense: ShardExtent | None
    experts: tuple[ShardExtent, ...]


@dataclass(frozen=True, slots=True)
class ResidentTensor:
    """A tensor that stays in memory; `dtype` is its safetensors name."""

    dtype: str
    shape: tuple[int, ...]
    extent: ShardExtent


@dataclass(slots=True)
class Store(Closing):
    """The open files of a store and a lock that excludes writers, until `close`.

    The extents of `layers` and `head` begin at multiples of 4096 bytes, except linked ones.
    """

    folder: Path
    manifest: Manifest
    layers: tuple[LayerExtents, ...] = ()
    head: ShardExtent | None = None
    resident: dict[str, ResidentTensor] = field(default_factory=dict)
    _descriptors: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Reads the manifest and the header of every file, but no weights.

        Raises StoreInUse while the store is being written, BadStore if it is unfinished, damaged or of another version.
        """
        descriptors = [lock_to_use(folder)]
        try:
            refuse_untrusted(os.stat(folder), folder)
            store = cls(folder, _read_manifest(folder), _descriptors=descriptors)
            store._find_extents()
        except BaseException:
            _close_all(descriptors)
            raise
        # Records that the store is used now, as the lock file's modification time, unless it cannot be changed.
        with suppress(OSError):
            os.utime(descriptors[0])
        return store

    def extents(self) -> Iterator[ShardExtent]:
        """Every shard, in the order in which a pass needs them."""
        yield from (tensor.extent for tensor in self.resident.values())
        for layer in self.layers:
            if layer.dense is not None:
                yield layer.dense
            yield from layer.experts
        if self.head is not None:
            yield self.head

    def verify(self) -> Iterator[tuple[ShardExtent, bool]]:
        """Reads all shards; yields each and whether it matches its CRC32."""
        for extent in self.extents():
            yield extent, is_sound(extent)

    def close(self) -> None:
        _close_all(self._descriptors)

    def _find_extents(self) -> None:
        files: dict[str, ShardFile] = {}
        sources = open_sources(self.manifest.sources)
        self._descriptors.extend(source.descriptor for source in sources)
        for record in self.manifest.files:
            file = files[record.name] = open_shard_file(self.folder, record, sources)
            self._descriptors.append(file.descriptor)
        if (head := files.pop(HEAD_FILE, None)) is not None:
            self.head = _single(head, "head")
        if (resident := files.pop(RESIDENT_FILE, None)) is not None:
            self.resident = {
                name: ResidentTensor(entry.dtype, entry.shape, _single(resident, name))
                for name, entry in resident.entries.items()
            }
        names = [layer_file(index) for index in range(len(files))]
        if set(names) != set(files):
            raise BadStore(
                f"{self.folder}: layers {sorted(files)[:3]}... are not numbered without gaps; prepare the model again"
            )
        self.layers = tuple(_layer(files[name]) for name in names)


def _read_manifest(folder: Path) -> Manifest:
    try:
        return read_manifest(folder / MANIFEST)
    except FileNotFoundError:
        raise BadStore(
            f"{folder} is unfinished: it has no {MANIFEST}; prepare the model again, finished files are kept"
        ) from None


def _layer(file: ShardFile) -> LayerExtents:
    dense = _single(file, "dense") if "dense" in file.extents else None
    return LayerExtents(dense, file.extents.get("experts", ()))


def _single(file: ShardFile, tensor: str) -> ShardExtent:
    extents = file.extents.get(tensor, ())
    if len(extents) != 1:
        raise BadStore(f"{file.path} has {len(extents)} shards of {tensor!r}, wanted 1; prepare the model again")
    return extents[0]


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
