"""A strict reader of GGUF headers, and a checkpoint of one or several such files.

Knows the file format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), not models. The `gguf` package reads
the same files, but trusts their counts and lengths, and keeps an object for every string of a vocabulary. Torch-free.
"""

from __future__ import annotations

import math
import os
import re
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import BadCheckpoint, MissingPackage
from .checkpoint import MAX_FILES, Checkpoint
from .header import MAX_NAME_NBYTES, MAX_TENSORS, TensorEntry, described

SUFFIX = ".gguf"
# Vocabularies and merges of 262,144 tokens take 15 MB.
MAX_HEADER_NBYTES = 64 << 20
MAX_KEYS = 4096
MAX_ITEMS = 1 << 20
# Of longer arrays, and of arrays of strings, only the length is kept: they belong to the tokenizer.
MAX_KEPT_ITEMS = 1024
_MAX_DIMS = 4
_MAX_NUMEL = 1 << 62
_ALIGNMENT = 32
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_UNCHANGED_NS = 100_000_000
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class Array(NamedTuple):
    """An array of which only the number of items is kept."""

    length: int


class GgufHeader(NamedTuple):
    """The header of one file: `metadata` by key, tensors with offsets from the start of the file, and its own size."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    nbytes: int


# By the identity of a file: device, inode, size, and when it was written and changed.
_headers: dict[tuple[int, ...], GgufHeader] = {}


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix == SUFFIX


def split_files(name: str) -> list[str]:
    """The names of all files of a split checkpoint, of which `name` is one; just `name` where it is not split."""
    match = _SPLIT.fullmatch(name)
    count = int(match[3]) if match else 0
    if match is None or not 1 <= count <= MAX_FILES:
        return [name]
    return [f"{match[1]}-{part:05}-of-{count:05}{SUFFIX}" for part in range(1, count + 1)]


@cache
def block_sizes() -> dict[int, tuple[str, int, int]]:
    """By number of a type: its name, and the elements and bytes of its blocks. Raises MissingPackage without `gguf`."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        raise MissingPackage("GGUF files need gguf, which is not installed: pip install 'gguf>=0.19'") from None
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def read_gguf_header(descriptor: int, file: str) -> GgufHeader:
    """Reads the header of an open file, which is named in messages. Raises BadCheckpoint.

    A header is kept while its file stays as it is: plan, shape and tokenizer all read it, and two million strings take
    a second.
    """
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if key in _headers:
        return _headers[key]
    with os.fdopen(os.dup(descriptor), "rb", buffering=1 << 16) as stream:
        stream.seek(0)
        reader = _Reader(stream, status.st_size, file)
        try:
            header = reader.header()
        except ValueError as fault:
            raise BadCheckpoint(f"{file}: {fault}") from None
    # A file that was written a moment ago may be written again without another time of change.
    if time.time_ns() - status.st_ctime_ns > _UNCHANGED_NS:
        if len(_headers) >= MAX_FILES:
            _headers.clear()
        _headers[key] = header
    return header


class _Reader:
    """Reads values one after the other; each method raises ValueError, which says what was found."""

    def __init__(self, stream: BinaryIO, file_nbytes: int, file: str) -> None:
        self._stream = stream
        self._file_nbytes = file_nbytes
        self._position = 0
        self._items = 0

    def header(self) -> GgufHeader:
        if (magic := self._take(4)) != b"GGUF":
            raise ValueError(f"it starts with {magic!r}, wanted b'GGUF'; not a GGUF file")
        version = self._number("<I")
        if version not in (2, 3):
            hint = "a file for big-endian machines" if version & 0xFFFF == 0 else "wanted 2 or 3"
            raise ValueError(f"version {version} of GGUF was found, {hint}; convert the model again")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise ValueError(
                f"{num_tensors} tensors and {num_keys} keys, at most {MAX_TENSORS} and {MAX_KEYS} are read"
            )
        metadata = self._metadata(num_keys)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {described(alignment)}, wanted a power of two from 8 on")
        found = [self._tensor() for _ in range(num_tensors)]
        base = -(-self._position // alignment) * alignment
        tensors = {entry.name: entry._replace(begin=base + entry.begin, end=base + entry.end) for entry in found}
        if len(tensors) != num_tensors:
            raise ValueError("two tensors have the same name")
        self._check_offsets(found, base, alignment)
        return GgufHeader(metadata, tensors, base)

    def _metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string(MAX_NAME_NBYTES)
            if key in metadata:
                raise ValueError(f"key {described(key)} occurs twice")
            metadata[key] = self._value(key, self._number("<I"))
        return metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(key, kind)
        kind, count = self._number("<I"), self._number("<Q")
        self._items += count
        if self._items > 2 * MAX_ITEMS:
            raise ValueError(f"{described(key)} has {count} items, at most {2 * MAX_ITEMS} are read in all")
        if kind == _STRING:
            for _ in range(count):
                self._string()
            return Array(count)
        if kind not in _SCALARS:
            raise ValueError(f"{described(key)} is an array of type {kind}, wanted numbers or strings")
        if count > MAX_KEPT_ITEMS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
            return Array(count)
        return [self._scalar(key, kind) for _ in range(count)]

    def _scalar(self, key: str, kind: int) -> Any:
        if kind not in _SCALARS:
            raise ValueError(f"{described(key)} is of type {kind}, which GGUF does not have")
        value = self._number(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _tensor(self) -> TensorEntry:
        name = self._string(MAX_NAME_NBYTES)
        if not name.isprintable() or not name:
            raise ValueError(f"a tensor is named {described(name)}")
        num_dims = self._number("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {described(name)} has {num_dims} dimensions, wanted 1 to {_MAX_DIMS}")
        # The last dimension of torch is the first one here.
        shape = tuple(reversed([self._number("<Q") for _ in range(num_dims)]))
        kind, begin = self._number("<I"), self._number("<Q")
        if kind not in block_sizes():
            raise ValueError(f"tensor {described(name)} is of type {kind}, which the gguf package does not know")
        type_name, block, block_nbytes = block_sizes()[kind]
        numel = math.prod(shape)
        if min(shape) < 1 or numel > _MAX_NUMEL or shape[-1] % block:
            raise ValueError(f"tensor {described(name)} is {list(shape)} in {type_name}, whose blocks have {block}")
        return TensorEntry(name, type_name, shape, begin, begin + numel // block * block_nbytes)

    def _check_offsets(self, tensors: list[TensorEntry], base: int, alignment: int) -> None:
        position = 0
        for entry in sorted(tensors, key=lambda each: each.begin):
            if entry.begin != position:
                raise ValueError(f"tensor {described(entry.name)} is at byte {entry.begin}, wanted {position}")
            position = -(-entry.end // alignment) * alignment
            if base + entry.end > self._file_nbytes:
                raise ValueError(
                    f"tensor {described(entry.name)} ends at byte {base + entry.end}, the file at "
                    f"{self._file_nbytes}; download it again"
                )

    def _string(self, most: int = MAX_HEADER_NBYTES) -> str:
        length = self._number("<Q")
        if length > most:
            raise ValueError(f"a string of {length} bytes at byte {self._position}, at most {most} are read")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise ValueError(f"the string at byte {self._position - length} is not UTF-8") from None

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _skip(self, count: int) -> None:
        while count:
            count -= len(self._take(min(count, 1 << 20)))

    def _take(self, count: int) -> bytes:
        self._position += count
        if self._position > min(self._file_nbytes, MAX_HEADER_NBYTES):
            raise ValueError(
                f"the header ends behind byte {min(self._file_nbytes, MAX_HEADER_NBYTES)}; the file is truncated or "
                "not GGUF"
            )
        data = self._stream.read(count)
        if len(data) != count:
            raise ValueError("the file ends inside its header; it changed while it was read")
        return data


class GgufCheckpoint(Checkpoint):
    """All tensors of a GGUF file, or of all files of a split one; `metadata` is that of the first.

    `entries` have the names, types and shapes of the files. Raises BadCheckpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = {}
        super().__init__(path.parent)

    def _open_all(self) -> None:
        for file in split_files(self.path.name):
            self._open(file)

    def _read_header(self, descriptor: int, file: str) -> Mapping[str, TensorEntry]:
        header, files = read_gguf_header(descriptor, str(self.folder / file)), split_files(self.path.name)
        self._check_split(header.metadata, files.index(file), len(files), file)
        self.metadata = self.metadata or header.metadata
        return header.tensors

    def _check_split(self, metadata: Mapping[str, Any], number: int, count: int, file: str) -> None:
        found = metadata.get("split.no", 0), metadata.get("split.count", 0) or 1
        if found != (number, count):
            raise BadCheckpoint(
                f"{self.folder / file}: it says that it is part {found[0]} of {found[1]}, its name says {number} of "
                f"{count}; give back the names that the files had"
            )
