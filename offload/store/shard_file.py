"""Reads one file of a store: checked against its record when opened, its shards when they are read.

Knows tensors that are cut into equal shards, each with a CRC32; not what they are for.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..atomic_file import AtomicFile
from ..checkpoint.header import ITEM_BITS, TensorEntry, header_nbytes, parse_header
from ..errors import BadCheckpoint, BadStore
from .access import open_trusted
from .manifest import FileRecord

_CHUNK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a shard lies: `nbytes` at `offset` of the open file `descriptor`; `index` counts within its tensor."""

    path: Path
    tensor: str
    index: int
    descriptor: int
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of a store, open; its size and header are those of its record, its data is not read yet."""

    path: Path
    descriptor: int
    entries: dict[str, TensorEntry]
    places: dict[str, tuple[ShardPlace, ...]]


def open_shard_file(folder: Path, record: FileRecord) -> ShardFile:
    """Raises BadStore if the file is missing or is not what `record` says."""
    path = folder / record.name
    try:
        descriptor = open_trusted(path)
    except FileNotFoundError:
        raise BadStore(f"{path} is missing; prepare the model again, only this file is made anew") from None
    try:
        entries = _checked_entries(descriptor, path, record)
        places = {name: tuple(_places(path, descriptor, entry, record)) for name, entry in entries.items()}
    except BaseException:
        os.close(descriptor)
        raise
    return ShardFile(path, descriptor, entries, places)


def _checked_entries(descriptor: int, path: Path, record: FileRecord) -> dict[str, TensorEntry]:
    nbytes = os.fstat(descriptor).st_size
    if nbytes != record.nbytes:
        raise BadStore(f"{path} has {nbytes} bytes, wanted {record.nbytes}; prepare the model again")
    try:
        header = os.pread(descriptor, 8 + header_nbytes(os.pread(descriptor, 8, 0), nbytes, str(path)), 0)
        entries = parse_header(header[8:], nbytes, str(path))
    except BadCheckpoint as error:
        raise BadStore(f"{error}; this is a store's file: prepare the model again") from None
    if zlib.crc32(header) != record.header_crc32 or set(entries) != set(record.shards_crc32):
        raise BadStore(f"{path} has another header than the manifest says; prepare the model again")
    return entries


def _places(path: Path, descriptor: int, entry: TensorEntry, record: FileRecord) -> Iterator[ShardPlace]:
    crcs = record.shards_crc32[entry.name]
    if not crcs or entry.nbytes % len(crcs):
        raise BadStore(f"{path}: {entry.name} has {entry.nbytes} bytes, which {len(crcs)} shards cannot share equally")
    nbytes = entry.nbytes // len(crcs)
    for index, crc in enumerate(crcs):
        yield ShardPlace(path, entry.name, index, descriptor, entry.begin + index * nbytes, nbytes, crc)


def read_shard(place: ShardPlace, target: memoryview, check: bool = False) -> None:
    """Fills `target`, of the shard's size. With `check`, raises BadStore if the bytes are not those once written."""
    position = 0
    while position < place.nbytes:
        read = os.preadv(place.descriptor, [target[position : place.nbytes]], place.offset + position)
        if read <= 0:
            raise BadStore(f"{place.path} ends inside {place.tensor} {place.index}; it changed while it was read")
        position += read
    if check and zlib.crc32(target[: place.nbytes]) != place.crc32:
        raise BadStore(damage(place))


def is_sound(place: ShardPlace) -> bool:
    """Reads the shard, a few MiB at a time, and leaves nothing of it in the page cache; what cannot be read is not."""
    crc = 0
    try:
        for begin in range(0, place.nbytes, _CHUNK_NBYTES):
            length = min(_CHUNK_NBYTES, place.nbytes - begin)
            crc = zlib.crc32(os.pread(place.descriptor, length, place.offset + begin), crc)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
    os.posix_fadvise(place.descriptor, place.offset, place.nbytes, os.POSIX_FADV_DONTNEED)
    return crc == place.crc32


def damage(place: ShardPlace) -> str:
    return (
        f"{place.path}: {place.tensor} {place.index}, {place.nbytes} bytes at {place.offset}, do not match their "
        "CRC32; prepare the model again, only damaged files are made anew"
    )


def is_intact(folder: Path, record: FileRecord) -> bool:
    """Whether the file is there and every byte of it is the one that was written."""
    try:
        file = open_shard_file(folder, record)
    except BadStore:
        return False
    try:
        return all(is_sound(place) for places in file.places.values() for place in places)
    finally:
        os.close(file.descriptor)


ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written; `dtype` as safetensors names it. Its first dimension is cut into `num_shards`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_shards: int = 1

    @property
    def item_bits(self) -> int:
        return ITEM_BITS[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item_bits // 8


class NewShardFile:
    """A file being written: shards in any order, each whole or in consecutive pieces, and the header at the end."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._header = build_header(specs)
        self._name = path.name
        self._nbytes = len(self._header) + sum(spec.nbytes for spec in specs)
        self._entries = parse_header(self._header[8:], self._nbytes, path.name)
        self._written = {spec.name: [0] * spec.num_shards for spec in specs}
        self._crc32 = {spec.name: [0] * spec.num_shards for spec in specs}
        self._file = AtomicFile(path)

    def write(self, tensor: str, index: int, data: memoryview) -> None:
        """The next bytes of a shard. Raises ValueError for more than it holds."""
        view = data.cast("B")
        entry, written = self._entries[tensor], self._written[tensor]
        shard_nbytes = entry.nbytes // len(written)
        if written[index] + view.nbytes > shard_nbytes:
            raise ValueError(
                f"{self._name}: {tensor} {index} holds {shard_nbytes} bytes, {view.nbytes} more were given"
            )
        self._file.write_at(entry.begin + index * shard_nbytes + written[index], view)
        self._crc32[tensor][index] = zlib.crc32(view, self._crc32[tensor][index])
        written[index] += view.nbytes

    def publish(self) -> FileRecord:
        """Raises ValueError if a shard is not whole."""
        for tensor, written in self._written.items():
            if sum(written) != self._entries[tensor].nbytes:
                raise ValueError(
                    f"{self._name}: {tensor} holds {self._entries[tensor].nbytes} bytes, {sum(written)} were written"
                )
        self._file.write_at(0, memoryview(self._header))
        self._file.publish()
        crcs = {tensor: tuple(values) for tensor, values in self._crc32.items()}
        return FileRecord(self._name, self._nbytes, zlib.crc32(self._header), crcs)

    def discard(self) -> None:
        self._file.discard()


def build_header(specs: Sequence[TensorSpec]) -> bytes:
    """Everything before the data: length, JSON in the order of the data, blanks up to a multiple of 4096."""
    fields, begin = {}, 0
    for spec in specs:
        fields[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (begin, begin + spec.nbytes)}
        begin += spec.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    padded = text.ljust(-(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8)
    return struct.pack("<Q", len(padded)) + padded
