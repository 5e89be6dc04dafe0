"""Reads one file of a store, whose tensors are cut into equal shards, each with a CRC32.

A file is checked against its record when it is opened, a shard when it is read. Knows bytes, not what they are for.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.header import TensorEntry, header_nbytes, parse_header
from ..errors import BadCheckpoint, BadStore
from .manifest import FileRecord, LinkedTensor, OpenSource, SourceFile, close_sources, open_sources, open_trusted

_CHUNK_NBYTES = 4 << 20


class ExtentPart(NamedTuple):
    """`nbytes` from byte `begin` of a shard on: those at `offset` of the open file `descriptor`."""

    path: Path
    descriptor: int
    begin: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardExtent:
    """The extent of a shard: `nbytes` at `offset` of the open file `descriptor`; `index` is its index in its tensor.

    If `linked` has parts, they are the shard: in the checkpoint's files, at any offset. Bytes between them are of no
    use.
    """

    path: Path
    tensor: str
    index: int
    descriptor: int
    offset: int
    nbytes: int
    crc32: int
    linked: tuple[ExtentPart, ...] = ()

    @property
    def parts(self) -> tuple[ExtentPart, ...]:
        return self.linked or (ExtentPart(self.path, self.descriptor, 0, self.offset, self.nbytes),)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """An open file of a store whose size and header match its record; its data is not read yet."""

    path: Path
    descriptor: int
    entries: dict[str, TensorEntry]
    extents: dict[str, tuple[ShardExtent, ...]]


def open_shard_file(folder: Path, record: FileRecord, sources: Sequence[OpenSource] = ()) -> ShardFile:
    """Opens a file of a store. Raises BadStore if it is missing or does not match `record`.

    `sources` are the checkpoint's files that its linked tensors lie in.
    """
    path = folder / record.name
    try:
        descriptor = open_trusted(path)
    except FileNotFoundError:
        raise BadStore(f"{path} is missing; prepare the model again, only this file is written again") from None
    try:
        entries = _checked_entries(descriptor, path, record)
        extents = {name: tuple(_extents(path, descriptor, entry, record)) for name, entry in entries.items()}
    except BaseException:
        os.close(descriptor)
        raise
    for name, tensor in record.linked.items():
        entries[name] = TensorEntry(name, tensor.dtype, tensor.shape, 0, tensor.nbytes)
        extents[name] = tuple(_linked_extents(name, tensor, sources))
    return ShardFile(path, descriptor, entries, extents)


def _linked_extents(name: str, tensor: LinkedTensor, sources: Sequence[OpenSource]) -> Iterator[ShardExtent]:
    nbytes = tensor.nbytes // len(tensor.shards)
    for index, shard in enumerate(tensor.shards):
        parts = tuple(ExtentPart(*sources[each.source], each.begin, each.offset, each.nbytes) for each in shard.parts)
        yield ShardExtent(parts[0].path, name, index, parts[0].descriptor, parts[0].offset, nbytes, shard.crc32, parts)


def _checked_entries(descriptor: int, path: Path, record: FileRecord) -> dict[str, TensorEntry]:
    nbytes = os.fstat(descriptor).st_size
    if nbytes != record.nbytes:
        raise BadStore(f"{path} has {nbytes} bytes, wanted {record.nbytes}; prepare the model again")
    try:
        header = os.pread(descriptor, 8 + header_nbytes(os.pread(descriptor, 8, 0), nbytes, str(path)), 0)
        entries = parse_header(header[8:], nbytes, str(path))
    except BadCheckpoint as error:
        raise BadStore(f"{error}; this is a file of a store: prepare the model again") from None
    if zlib.crc32(header) != record.header_crc32 or set(entries) != set(record.shards_crc32):
        raise BadStore(f"the header of {path} does not match the manifest; prepare the model again")
    return entries


def _extents(path: Path, descriptor: int, entry: TensorEntry, record: FileRecord) -> Iterator[ShardExtent]:
    crcs = record.shards_crc32[entry.name]
    if not crcs or entry.nbytes % len(crcs):
        raise BadStore(
            f"{path}: {entry.name} has {entry.nbytes} bytes, which cannot be cut into {len(crcs)} equal shards"
        )
    nbytes = entry.nbytes // len(crcs)
    for index, crc in enumerate(crcs):
        yield ShardExtent(path, entry.name, index, descriptor, entry.begin + index * nbytes, nbytes, crc)


def read_shard(extent: ShardExtent, target: memoryview) -> None:
    """Reads a shard into `target`, of its size. Raises BadStore if its CRC32 differs.

    Bytes between the parts of a linked shard stay as they are.
    """
    crc = 0
    for part in extent.parts:
        into = target[part.begin : part.begin + part.nbytes]
        _read_part(extent, part, into)
        crc = zlib.crc32(into, crc)
    if crc != extent.crc32:
        raise BadStore(damage(extent))


def _read_part(extent: ShardExtent, part: ExtentPart, target: memoryview) -> None:
    position = 0
    while position < part.nbytes:
        read = os.preadv(part.descriptor, [target[position:]], part.offset + position)
        if read <= 0:
            raise BadStore(f"{part.path} ends inside {extent.tensor} {extent.index}; it changed while it was read")
        position += read


def is_sound(extent: ShardExtent) -> bool:
    """Whether the shard matches its CRC32; false if it cannot be read. Reads a few MiB at a time.

    Leaves nothing of it in the page cache.
    """
    crc = 0
    try:
        for part in extent.parts:
            for begin in range(0, part.nbytes, _CHUNK_NBYTES):
                length = min(_CHUNK_NBYTES, part.nbytes - begin)
                crc = zlib.crc32(os.pread(part.descriptor, length, part.offset + begin), crc)
            os.posix_fadvise(part.descriptor, part.offset, part.nbytes, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False
    return crc == extent.crc32


def damage(extent: ShardExtent) -> str:
    """The message about a shard that does not match its CRC32."""
    if extent.linked:
        return (
            f"{extent.path}: {extent.tensor} {extent.index}, read from the checkpoint's own file, does not match its "
            "CRC32; the file is damaged: download the checkpoint again"
        )
    return (
        f"{extent.path}: {extent.tensor} {extent.index}, {extent.nbytes} bytes at {extent.offset}, do not match their "
        "CRC32; prepare the model again, only damaged files are written again"
    )


def is_intact(folder: Path, record: FileRecord, sources: Sequence[SourceFile] = ()) -> bool:
    """Whether the file exists and its header and all its shards match their CRC32, linked ones too."""
    opened: list[OpenSource] = []
    try:
        opened = open_sources(sources)
        file = open_shard_file(folder, record, opened)
    except BadStore:
        close_sources(opened)
        return False
    try:
        return all(is_sound(extent) for extents in file.extents.values() for extent in extents)
    finally:
        os.close(file.descriptor)
        close_sources(opened)
