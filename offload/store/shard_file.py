"""Reads one file of a store: checked against its record when opened, its shards when they are read.

Knows tensors that are cut into equal shards, each with a CRC32; not what they are for.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.header import TensorEntry, header_nbytes, parse_header
from ..errors import BadCheckpoint
from .errors import BadStore
from .manifest import FileRecord
from .trusted import open_trusted

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
