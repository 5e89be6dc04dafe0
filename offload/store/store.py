"""A finished store of packed weights: where every shard lies, checked and locked while it is used.

Knows layers, experts, the head and resident parts as runs of bytes; knows neither weight formats nor models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import BadStore
from .access import lock_to_use, refuse_untrusted
from .manifest import HEAD_FILE, MANIFEST, RESIDENT_FILE, Manifest, layer_file, read_manifest
from .shard_file import ShardFile, ShardPlace, is_sound, open_shard_file, read_shard


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """`dense` is None where the layer has none; the experts are adjacent and of one size."""

    dense: ShardPlace | None
    experts: tuple[ShardPlace, ...]


@dataclass(frozen=True, slots=True)
class ResidentTensor:
    """`dtype` as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    place: ShardPlace


@dataclass(slots=True)
class Store:
    """Open files, and a lock that keeps writers away, until `close`. `layers` and `head` lie at multiples of 4096."""

    folder: Path
    manifest: Manifest
    layers: tuple[LayerPlaces, ...] = ()
    head: ShardPlace | None = None
    resident: dict[str, ResidentTensor] = field(default_factory=dict)
    _descriptors: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Reads the manifest and every file's header, no weights.

        Raises StoreInUse while it is written, BadStore if it is unfinished, damaged or of another version.
        """
        descriptors = [lock_to_use(folder)]
        try:
            refuse_untrusted(os.stat(folder), folder)
            store = cls(folder, _read_manifest(folder), _descriptors=descriptors)
            store._find_places()
        except BaseException:
            _close_all(descriptors)
            raise
        _note_use(descriptors[0])
        return store

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    def read_into(self, place: ShardPlace, target: memoryview, check: bool = False) -> None:
        """Fills `target`, of the shard's size. With `check`, raises BadStore if its CRC32 differs."""
        read_shard(place, target, check)

    def places(self) -> Iterator[ShardPlace]:
        """Every shard, in the order in which a pass wants them."""
        yield from (tensor.place for tensor in self.resident.values())
        for layer in self.layers:
            if layer.dense is not None:
                yield layer.dense
            yield from layer.experts
        if self.head is not None:
            yield self.head

    def verify(self) -> Iterator[tuple[ShardPlace, bool]]:
        """Reads everything: each shard, and whether its bytes are those once written."""
        for place in self.places():
            yield place, is_sound(place)

    def close(self) -> None:
        _close_all(self._descriptors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find_places(self) -> None:
        files: dict[str, ShardFile] = {}
        for record in self.manifest.files:
            file = files[record.name] = open_shard_file(self.folder, record)
            self._descriptors.append(file.descriptor)
        if (head := files.pop(HEAD_FILE, None)) is not None:
            self.head = _single(head, "head")
        if (resident := files.pop(RESIDENT_FILE, None)) is not None:
            self.resident = _resident(resident)
        names = [layer_file(index) for index in range(len(files))]
        if set(names) != set(files):
            raise BadStore(f"{self.folder}: layers {sorted(files)[:3]}... have gaps; prepare the model again")
        self.layers = tuple(_layer(files[name]) for name in names)


def _read_manifest(folder: Path) -> Manifest:
    try:
        return read_manifest(folder / MANIFEST)
    except FileNotFoundError:
        raise BadStore(
            f"{folder} is unfinished: it has no {MANIFEST}; prepare the model again, finished files are kept"
        ) from None


def _layer(file: ShardFile) -> LayerPlaces:
    dense = _single(file, "dense") if "dense" in file.places else None
    return LayerPlaces(dense, file.places.get("experts", ()))


def _single(file: ShardFile, tensor: str) -> ShardPlace:
    places = file.places.get(tensor, ())
    if len(places) != 1:
        raise BadStore(f"{file.path} has {len(places)} shards of {tensor!r}, wanted 1; prepare the model again")
    return places[0]


def _resident(file: ShardFile) -> dict[str, ResidentTensor]:
    return {name: ResidentTensor(entry.dtype, entry.shape, _single(file, name)) for name, entry in file.entries.items()}


def _note_use(lock: int) -> None:
    """The lock's time of change says when the store was last used; a read-only or foreign store keeps no such note."""
    with suppress(OSError):
        os.utime(lock)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
