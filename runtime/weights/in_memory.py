"""Where a preparation puts shards that are all kept in memory, host's or device's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from ..shape.shards import LayerShards
from .memory import HEAD, ShardKey, WeightMemory


@dataclass(frozen=True, slots=True)
class MemoryLayerSink:
    memory: WeightMemory
    index: int

    def dense(self) -> AbstractContextManager[torch.Tensor]:
        return self.memory.fill(ShardKey(self.index))

    def expert(self, index: int) -> AbstractContextManager[torch.Tensor]:
        return self.memory.fill(ShardKey(self.index, index))


class MemorySink:
    """A ShardSink for memory that leaves nothing on disk."""

    def __init__(self, memory: WeightMemory) -> None:
        self._memory = memory

    def has_layer(self, index: int) -> bool:
        return False

    @contextmanager
    def layer(self, index: int, shards: LayerShards) -> Iterator[MemoryLayerSink]:
        yield MemoryLayerSink(self._memory, index)

    def head(self, nbytes: int) -> AbstractContextManager[torch.Tensor]:
        return self._memory.fill(HEAD)
