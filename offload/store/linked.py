"""Shards that a store does not copy: their bytes lie in the checkpoint's own files, named by path, size and time."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..checkpoint.header import ITEM_BITS
from ..errors import BadStore


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the checkpoint as it was when its bytes were checked: its absolute path, size and modification time."""

    path: str
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> Self:
        return cls(str(path.resolve()), status.st_size, status.st_mtime_ns)

    def open(self) -> OpenSource:
        """Opens the file for reading. Raises BadStore if it is missing, or is not as it was."""
        path = Path(self.path)
        again = "`moedge models rm` removes the store that names it, and the next run reads the file again"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise BadStore(
                f"{path} cannot be opened ({error.strerror}), and weights are read from it; put it back, or {again}"
            ) from None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (self.nbytes, self.mtime_ns):
            return OpenSource(path, descriptor)
        os.close(descriptor)
        raise BadStore(
            f"{path} changed after its checksums were taken: it has {status.st_size} bytes and was modified at "
            f"{status.st_mtime_ns / 1e9:.3f} (seconds since 1970), wanted {self.nbytes} bytes and "
            f"{self.mtime_ns / 1e9:.3f}; if the change is wanted, {again}"
        )


class OpenSource(NamedTuple):
    """An open file of the checkpoint."""

    path: Path
    descriptor: int


def open_sources(sources: Sequence[SourceFile]) -> list[OpenSource]:
    """Opens all files. Raises BadStore, with none left open."""
    opened: list[OpenSource] = []
    try:
        for source in sources:
            opened.append(source.open())
    except BaseException:
        close_sources(opened)
        raise
    return opened


def close_sources(opened: list[OpenSource]) -> None:
    while opened:
        os.close(opened.pop().descriptor)


class LinkedPart(NamedTuple):
    """`nbytes` from byte `begin` of a shard on are those at `offset` of the file with the index `source`."""

    begin: int
    source: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LinkedShard:
    """The parts of a shard in its order, and the CRC32 of their bytes; bytes between them are of no use."""

    crc32: int
    parts: tuple[LinkedPart, ...]


@dataclass(frozen=True, slots=True)
class LinkedTensor:
    """A tensor of a store's file that is cut into equal shards, all of which lie in the checkpoint's files."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[LinkedShard, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8

    def to_json(self) -> dict[str, Any]:
        shards = [[f"{shard.crc32:08x}", [list(part) for part in shard.parts]] for shard in self.shards]
        return {"dtype": self.dtype, "shape": list(self.shape), "shards": shards}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], sources: Sequence[SourceFile]) -> Self:
        """Raises ValueError, TypeError or KeyError for anything but parts inside their shards and files."""
        shards = tuple(
            LinkedShard(int(crc, 16), tuple(LinkedPart(*part) for part in parts)) for crc, parts in content["shards"]
        )
        tensor = cls(content["dtype"], tuple(content["shape"]), shards)
        if not shards or tensor.nbytes % len(shards):
            raise ValueError("shards are not of one size")
        if not all(shard.parts for shard in shards):
            raise ValueError("a shard has no parts")
        for part in (part for shard in shards for part in shard.parts):
            if min(part) < 0 or part.begin + part.nbytes > tensor.nbytes // len(shards):
                raise ValueError("a part is outside its shard")
            if part.offset + part.nbytes > sources[part.source].nbytes:
                raise ValueError("a part is outside its file")
        return tensor
