"""Finds bytes in the files of a checkpoint: the runs of its tensors that, one after the other, are equal to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .checkpoint import Checkpoint

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
