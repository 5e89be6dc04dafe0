"""Writes one file of a store: tensors in a safetensors file whose data starts at a multiple of 4096.

A tensor is cut into equal shards along its first dimension, one for the whole tensor or one per expert, each with a
CRC32. Knows the file format only (https://huggingface.co/docs/safetensors), not what the tensors are for.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.header import ITEM_BITS, parse_header
from .durable import NewFile
from .manifest import FileRecord

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
        self._file = NewFile(path)

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
