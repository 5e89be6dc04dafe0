"""Where the tokens of a pass go in the cache, and where each sequence's blocks are: the same for a group's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batch import Batch, Chunk
from ..kv.cache import KVCache


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """Of one layer group: slot of every token of the pass [T], also as block id and offset, and a block table for
    every chunk."""

    slots: torch.Tensor
    block_ids: torch.Tensor
    offsets: torch.Tensor
    tables: dict[Chunk, torch.Tensor]

    @classmethod
    def of(cls, batch: Batch, group: int, block: int, device: torch.device | str) -> GroupPlaces:
        tables = {chunk: torch.tensor(chunk.sequence.table.blocks[group]) for chunk in batch.chunks}
        slots = slots_of(batch.chunks, list(tables.values()), block)
        return cls(
            slots.to(device),
            (slots // block).to(device),
            (slots % block).to(device),
            {chunk: table.to(device) for chunk, table in tables.items()},
        )


def slots_of(chunks: Sequence[Chunk], tables: Sequence[torch.Tensor], block: int) -> torch.Tensor:
    """Block id * block + offset of every token of the pass, int64 [T]; `tables` are the chunks' block tables."""
    slots = []
    for chunk, table in zip(chunks, tables, strict=True):
        positions = torch.arange(chunk.past, chunk.past + chunk.count)
        slots.append(table[positions // block].long() * block + positions % block)
    return torch.cat(slots)


class PassPlaces:
    """The places of the pass that is running."""

    def __init__(self, cache: KVCache, device: torch.device | str) -> None:
        self._cache = cache
        self._device = device
        self._batch: Batch | None = None
        self._groups: list[GroupPlaces] = []

    def of(self, batch: Batch, group: int) -> GroupPlaces:
        if self._batch is not batch:
            self._batch = batch
            self._groups = [
                GroupPlaces.of(batch, index, self._cache.block, self._device) for index in range(len(self._cache.pools))
            ]
        return self._groups[group]
