"""All packed weights in host memory: where shards are put while loading, and where passes find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from ..moe.held import HeldExperts
from ..offload.arena import Arena
from .model.assembly import LayerAssembly


class MemorySink:
    """Keeps every shard in an arena of its own size; a layer's experts lie side by side."""

    def __init__(self) -> None:
        self._dense: dict[int, torch.Tensor] = {}
        self._experts: dict[int, Arena] = {}
        self.head_shard: torch.Tensor | None = None

    @contextmanager
    def dense(self, layer: int, nbytes: int) -> Iterator[torch.Tensor]:
        self._dense[layer] = Arena(nbytes, 1).slot(0)
        yield self._dense[layer]

    def experts(self, layer: int, count: int, nbytes: int) -> Callable[[int], nullcontext[torch.Tensor]]:
        arena = self._experts[layer] = Arena(nbytes, count)
        return lambda expert: nullcontext(arena.slot(expert))

    @contextmanager
    def head(self, nbytes: int) -> Iterator[torch.Tensor]:
        self.head_shard = Arena(nbytes, 1).slot(0)
        yield self.head_shard

    def bind(self, index: int, layer: LayerAssembly) -> None:
        """Lets a layer's modules read their bytes, once and for all."""
        layer.bind_dense(self._dense[index])
        if layer.experts is not None:
            arena = self._experts[index]
            layer.set_experts(HeldExperts([layer.bind_expert(e, arena.slot(e)) for e in range(arena.num_slots)]))
