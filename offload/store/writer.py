"""Writes a store file by file. If the process is killed, the unfinished store does not open and the next run resumes.

Knows how layers, the head and resident tensors are laid out in files; receives packed bytes, not their meaning.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..atomic_file import AtomicFile, rename, write_atomically
from ..checkpoint.header import ITEM_BITS, parse_header
from ..closing import Closing
from ..errors import DiskFull
from .manifest import (
    HEAD_FILE,
    MANIFEST,
    PROGRESS,
    RESIDENT_FILE,
    FileRecord,
    LinkedTensor,
    Manifest,
    SourceFile,
    begun_manifest,
    layer_file,
    lock_to_write,
    make_folder,
    remove_files_except,
)
from .shard_file import is_intact

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written; `dtype` is its safetensors name. Its first dimension is cut into `num_shards`."""

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


class StoreWriter(Closing):
    """Writes a store, with exclusive access to its folder until `close`.

    Call `has(name)` for every file, write those for which it is false, then call `finish`. `recipe` is everything apart
    from the model's `fingerprint` that determines the bytes. Files of another version, model or recipe are removed.
    `nbytes_written` counts the bytes of the files that this process finished. Raises StoreInUse, and BadStore if the
    folder contains anything but a store.
    """

    def __init__(
        self, folder: Path, recipe: Mapping[str, Any], fingerprint: str, sources: Sequence[SourceFile] = ()
    ) -> None:
        """`sources` are the checkpoint's files that linked tensors lie in."""
        self.folder = folder
        self._empty = Manifest.begin(fingerprint, recipe, sources)
        self._done: dict[str, FileRecord] = {}
        self.nbytes_written = 0
        make_folder(folder)
        self._lock = lock_to_write(folder)
        try:
            begun = begun_manifest(folder, self._empty)
            self._unchecked = {file.name: file for file in begun.files}
            remove_files_except(folder, set(self._unchecked) | {MANIFEST, PROGRESS})
        except BaseException:
            self.close()
            raise

    @property
    def complete(self) -> bool:
        """Whether the folder has a complete store with the same inputs, so that nothing needs to be written."""
        return (self.folder / MANIFEST).exists()

    def has(self, name: str) -> bool:
        """Whether this run or an earlier one finished the file; reads all of it the first time."""
        record = None if name in self._done else self._unchecked.get(name)
        if record is not None and is_intact(self.folder, record, self._empty.sources):
            self._done[name] = self._unchecked.pop(name)
        return name in self._done

    @contextmanager
    def layer(self, index: int, dense_nbytes: int, num_experts: int, expert_nbytes: int) -> Iterator[NewShardFile]:
        """Writes a layer: the shard of `dense` (0 bytes: none) and those of `experts` (0: none), of multiples of 4096
        bytes."""
        specs = []
        if dense_nbytes:
            specs.append(_opaque("dense", (dense_nbytes,)))
        if num_experts:
            specs.append(_opaque("experts", (num_experts, expert_nbytes), num_experts))
        with self._file(layer_file(index), specs) as file:
            yield file

    def write_head(self, data: memoryview) -> None:
        """Writes the output head, one shard whose size is a multiple of 4096."""
        with self._file(HEAD_FILE, [_opaque("head", (data.nbytes,))]) as file:
            file.write("head", 0, data)

    def link_head(self, head: LinkedTensor) -> None:
        """Names the extents of the output head in the checkpoint's files."""
        with self._file(HEAD_FILE, []) as file:
            file.linked["head"] = head

    @contextmanager
    def resident(self, specs: Sequence[TensorSpec]) -> Iterator[NewShardFile]:
        """Writes named tensors of any size that always stay in memory; their order does not change the file."""
        # Wide elements come first: then all are aligned to their size without holes, which the format forbids.
        ordered = sorted(specs, key=lambda spec: (-spec.item_bits, spec.name))
        with self._file(RESIDENT_FILE, ordered) as file:
            yield file

    def finish(self, extra: Mapping[str, Any]) -> None:
        """Completes the store: it can be opened from now on. `extra` is JSON for its readers. Raises DiskFull."""
        if self._unchecked:
            raise ValueError(f"{sorted(self._unchecked)[:3]} are from an earlier run; call has() for each file first")
        num_layers = len(set(self._done) - {HEAD_FILE, RESIDENT_FILE})
        missing = [name for name in map(layer_file, range(num_layers)) if name not in self._done]
        if missing:
            raise ValueError(f"{missing[0]} was not written, but a later layer was")
        with self._or_disk_full(PROGRESS, len(self._manifest(extra).encode())):
            write_atomically(self.folder / PROGRESS, self._manifest(extra).encode())
            rename(self.folder / PROGRESS, self.folder / MANIFEST)

    def close(self) -> None:
        """Releases the lock; finished files stay for the next run."""
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            os.close(lock)

    @contextmanager
    def _file(self, name: str, specs: Sequence[TensorSpec]) -> Iterator[NewShardFile]:
        """A file that is published when the caller's block ends and discarded when it raises.

        A complete store becomes incomplete when a file is written.
        """
        with self._or_disk_full(name, sum(spec.nbytes for spec in specs)):
            if self.complete:
                rename(self.folder / MANIFEST, self.folder / PROGRESS)
            file = NewShardFile(self.folder / name, specs)
            try:
                yield file
                record = file.publish()
            except BaseException:
                file.discard()
                raise
            self._unchecked.pop(name, None)
            self._done[name] = record
            self.nbytes_written += record.nbytes
            write_atomically(self.folder / PROGRESS, self._manifest({}).encode())

    def _manifest(self, extra: Mapping[str, Any]) -> Manifest:
        return replace(self._empty, files=(*self._unchecked.values(), *self._done.values()), extra=extra)

    @contextmanager
    def _or_disk_full(self, name: str, nbytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            raise DiskFull(
                f"{self.folder / name} needs {nbytes} bytes and {shutil.disk_usage(self.folder).free} are free "
                f"({error.strerror}); free some disk space and run this again; it resumes from here"
            ) from error


class NewShardFile:
    """A file that is being written: shards in any order, each whole or in consecutive pieces; the header comes last."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self._header = build_header(specs)
        self._name = path.name
        self._nbytes = len(self._header) + sum(spec.nbytes for spec in specs)
        self._entries = parse_header(self._header[8:], self._nbytes, path.name)
        self._written = {spec.name: [0] * spec.num_shards for spec in specs}
        self._crc32 = {spec.name: [0] * spec.num_shards for spec in specs}
        self._file = AtomicFile(path)
        # Tensors that belong to this file and lie in the checkpoint's files.
        self.linked: dict[str, LinkedTensor] = {}

    def write(self, tensor: str, index: int, data: memoryview) -> None:
        """Writes the next bytes of a shard. Raises ValueError if they are more than the shard has."""
        view = data.cast("B")
        entry, written = self._entries[tensor], self._written[tensor]
        shard_nbytes = entry.nbytes // len(written)
        if written[index] + view.nbytes > shard_nbytes:
            raise ValueError(f"{self._name}: {tensor} {index} has {shard_nbytes} bytes, {view.nbytes} more were given")
        self._file.write_at(entry.begin + index * shard_nbytes + written[index], view)
        self._crc32[tensor][index] = zlib.crc32(view, self._crc32[tensor][index])
        written[index] += view.nbytes

    def publish(self) -> FileRecord:
        """Writes the header and publishes the file. Raises ValueError if a shard is incomplete."""
        for tensor, written in self._written.items():
            if sum(written) != self._entries[tensor].nbytes:
                raise ValueError(
                    f"{self._name}: {tensor} has {self._entries[tensor].nbytes} bytes, {sum(written)} were written"
                )
        self._file.write_at(0, memoryview(self._header))
        self._file.publish()
        crcs = {tensor: tuple(values) for tensor, values in self._crc32.items()}
        return FileRecord(self._name, self._nbytes, zlib.crc32(self._header), crcs, self.linked)

    def discard(self) -> None:
        self._file.discard()


def build_header(specs: Sequence[TensorSpec]) -> bytes:
    """All bytes before the data: length, JSON in the order of the data, spaces up to a multiple of 4096."""
    fields, begin = {}, 0
    for spec in specs:
        fields[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (begin, begin + spec.nbytes)}
        begin += spec.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    padded = text.ljust(-(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8)
    return struct.pack("<Q", len(padded)) + padded


def _opaque(name: str, shape: tuple[int, ...], num_shards: int = 1) -> TensorSpec:
    assert shape[-1] % ALIGNMENT == 0, f"{name}: {shape[-1]} bytes, wanted a multiple of {ALIGNMENT}"
    return TensorSpec(name, "U8", shape, num_shards)
