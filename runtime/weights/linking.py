"""Finds packed shards in the checkpoint's own files, so that a store names where they are instead of copying them.

A shard is made as for any other store and then looked for in the files, so what is named is equal, byte for byte, to
what would have been copied. Of a layer's experts the first and the last are made; where both lie in
the files in the same way, so do the others, whose bytes are only read, for checksums. Knows no family: what
transformers' conversions move or change is copied.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.errors import BadCheckpoint
from ...offload.store.manifest import LinkedPart, LinkedShard, SourceFile
from ...quant.tensor import SAFETENSORS_DTYPES, is_finite
from ..shape.read import LAYER, expert_index, with_expert_index
from ..shape.shards import ShardLayout

# The first bytes of a run, by which it is looked up before all of its bytes are compared.
_HEAD_NBYTES = 64
CHUNK_NBYTES = 1 << 20


class TensorRun(NamedTuple):
    """`nbytes` of a tensor from its byte `begin` on: all of it, or those of one of the experts that are stacked."""

    name: str
    begin: int
    nbytes: int


class RunFinder:
    """Finds bytes among `runs` of a checkpoint. Reads the first bytes of each run, and all of those that may match."""

    def __init__(self, checkpoint: Checkpoint, runs: Iterable[TensorRun]) -> None:
        self._checkpoint = checkpoint
        self._runs: dict[bytes, list[TensorRun]] = defaultdict(list)
        for run in runs:
            if run.nbytes:
                self._runs[self._read(run, 0, min(_HEAD_NBYTES, run.nbytes)).tobytes()].append(run)

    def find(self, data: memoryview) -> list[TensorRun] | None:
        """The runs whose bytes together are `data`; None where it is made otherwise."""
        found: list[TensorRun] = []
        while len(data):
            run = next((run for run in self._runs.get(bytes(data[:_HEAD_NBYTES]), ()) if self._begins(data, run)), None)
            if run is None:
                return None
            found.append(run)
            data = data[run.nbytes :]
        return found

    def _begins(self, data: memoryview, run: TensorRun) -> bool:
        """Whether the first bytes of `data` are those of the run."""
        if run.nbytes > len(data):
            return False
        for begin in range(0, run.nbytes, CHUNK_NBYTES):
            found = self._read(run, begin, min(CHUNK_NBYTES, run.nbytes - begin))
            if not np.array_equal(found, np.frombuffer(data[begin : begin + len(found)], np.uint8)):
                return False
        return True

    def _read(self, run: TensorRun, begin: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        read = np.empty(nbytes, np.uint8)
        self._checkpoint.read_into(run.name, read.data, run.begin + begin)
        return read


class ShardRun(NamedTuple):
    """A run of a checkpoint that is the bytes of a shard from `begin` on."""

    begin: int
    run: TensorRun


class Linker:
    """Finds packed bytes in the files of a checkpoint.

    `sources` are these files and `small` ones beside them, which are resident tensors under their keys.
    """

    def __init__(self, checkpoint: Checkpoint, small: dict[str, Path]) -> None:
        self._checkpoint = checkpoint
        files = {name: SourceFile.of(checkpoint.folder / name, status) for name, status in checkpoint.files.items()}
        files |= {name: SourceFile.of(path, path.stat()) for name, path in small.items()}
        self.sources = tuple(files.values())
        self._small = small
        self._index = {name: index for index, name in enumerate(files)}
        self._layers: dict[int | None, list[str]] = defaultdict(list)
        for name in checkpoint.entries:
            match = LAYER.search(name)
            self._layers[int(match[1]) if match else None].append(name)
        self._resident: RunFinder | None = None

    def dense(self, layer: int | None) -> RunFinder:
        """Whole tensors of a layer that are no expert's, or those outside of layers."""
        return RunFinder(self._checkpoint, map(self._whole, self._dense_names(layer)))

    def expert(self, layer: int, expert: int, num_experts: int) -> RunFinder:
        """The tensors of one expert, and its part of those that are stacked."""
        return RunFinder(self._checkpoint, self._expert_runs(layer, expert, num_experts))

    def find(self, layout: ShardLayout, shard: torch.Tensor, finder: RunFinder) -> list[ShardRun] | None:
        """The runs of a packed shard, uint8 [layout.nbytes]; None where some of its bytes are not in the files."""
        found, view = list[ShardRun](), shard.numpy().data
        for matrix in layout.matrices:
            for plane in matrix.layout.planes:
                begin = matrix.offset + plane.offset
                if (runs := finder.find(view[begin : begin + plane.nbytes])) is None:
                    return None
                for run in runs:
                    found.append(ShardRun(begin, run))
                    begin += run.nbytes
        return found

    def of_expert(self, first: list[ShardRun], expert: int) -> list[ShardRun] | None:
        """Where an expert lies if it lies as the first one of its layer does; None where there are no such tensors."""
        found = [ShardRun(begin, self._moved(run, expert)) for begin, run in first]
        return found if all(map(self._exists, found, first)) else None

    def link(self, runs: list[ShardRun], shard: torch.Tensor | None = None) -> LinkedShard | None:
        """The parts of a shard, with the checksum of its bytes: those of `shard`, or else of the files.

        None where the files hold weights that are NaN or infinite.
        """
        crc = 0
        for begin, run in runs:
            if shard is None:
                if (read := self._checksum(run, crc)) is None:
                    return None
                crc = read
            else:
                crc = zlib.crc32(shard.numpy().data[begin : begin + run.nbytes], crc)
        parts = (part for begin, run in runs for part in self._parts(begin, [run]))
        return LinkedShard(crc, tuple(_joined(parts)))

    def find_resident(self, name: str, data: memoryview) -> LinkedShard | None:
        """The same for a parameter that is not packed, or a small file."""
        if name in self._small:
            return LinkedShard(zlib.crc32(data), (LinkedPart(0, self._index[name], 0, len(data)),))
        if self._resident is None:
            names = [name for layer in self._layers for name in self._dense_names(layer)]
            self._resident = RunFinder(self._checkpoint, map(self._whole, names))
        runs = self._resident.find(data) if len(data) else None
        return LinkedShard(zlib.crc32(data), tuple(_joined(self._parts(0, runs)))) if runs else None

    def link_whole(self, names: Sequence[str]) -> LinkedShard:
        """The shard that tensors make one behind the other. Raises BadCheckpoint for NaN and infinity."""
        runs, begin = list[ShardRun](), 0
        for run in map(self._whole, names):
            runs.append(ShardRun(begin, run))
            begin += run.nbytes
        if (found := self.link(runs)) is None:
            raise BadCheckpoint(f"{runs[0].run.name} or a part behind it has weights that are NaN or infinite")
        return found

    def _moved(self, run: TensorRun, expert: int) -> TensorRun:
        if expert_index(run.name) is None:
            return run._replace(begin=run.begin + expert * run.nbytes)
        return run._replace(name=with_expert_index(run.name, expert))

    def _exists(self, found: ShardRun, first: ShardRun) -> bool:
        entry, like = self._checkpoint.entries.get(found.run.name), self._checkpoint.entries[first.run.name]
        same = entry is not None and (entry.dtype, entry.shape) == (like.dtype, like.shape)
        return same and found.run.begin + found.run.nbytes <= like.nbytes

    def _checksum(self, run: TensorRun, crc: int) -> int | None:
        """Continues a checksum with the bytes of a run; None where some of its weights are NaN or infinite."""
        dtype = SAFETENSORS_DTYPES[self._checkpoint.entries[run.name].dtype]
        buffer = torch.empty(min(CHUNK_NBYTES, run.nbytes), dtype=torch.uint8)
        for begin in range(0, run.nbytes, CHUNK_NBYTES):
            read = buffer[: min(CHUNK_NBYTES, run.nbytes - begin)]
            self._checkpoint.read_into(run.name, read.numpy().data, run.begin + begin)
            if not is_finite(read.view(dtype)):
                return None
            crc = zlib.crc32(read.numpy().data, crc)
        return crc

    def _dense_names(self, layer: int | None) -> list[str]:
        return [name for name in self._layers[layer] if expert_index(name) is None]

    def _whole(self, name: str) -> TensorRun:
        return TensorRun(name, 0, self._checkpoint.entries[name].nbytes)

    def _expert_runs(self, layer: int, expert: int, num_experts: int) -> Iterator[TensorRun]:
        for name in self._layers[layer]:
            entry = self._checkpoint.entries[name]
            if expert_index(name) == expert:
                yield self._whole(name)
            elif expert_index(name) is None and len(entry.shape) > 2 and entry.shape[0] == num_experts:
                nbytes = entry.nbytes // num_experts
                yield TensorRun(name, expert * nbytes, nbytes)

    def _parts(self, begin: int, runs: list[TensorRun]) -> Iterator[LinkedPart]:
        for name, from_byte, nbytes in runs:
            offset = self._checkpoint.entries[name].begin + from_byte
            yield LinkedPart(begin, self._index[self._checkpoint.file_of(name)], offset, nbytes)
            begin += nbytes


def _joined(parts: Iterator[LinkedPart] | list[LinkedPart]) -> list[LinkedPart]:
    """Parts that are neighbours in the shard and in their file are one."""
    joined: list[LinkedPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        ends = last and (last.begin + last.nbytes, last.source, last.offset + last.nbytes)
        if last and ends == part[:3]:
            joined[-1] = last._replace(nbytes=last.nbytes + part.nbytes)
        else:
            joined.append(part)
    return joined
