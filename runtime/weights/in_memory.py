"""All packed weights in host memory: where shards are put while loading, and where passes find them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...moe.held import HeldExperts
from ...offload.arena import Arena
from ..model.assembly import LayerAssembly
from ..shape.shards import LayerShards


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """A layer's shards in memory; its experts lie side by side."""

    dense_shard: torch.Tensor
    experts: Arena | None

    @contextmanager
    def dense(self) -> Iterator[torch.Tensor]:
        yield self.dense_shard

    @contextmanager
    def expert(self, index: int) -> Iterator[torch.Tensor]:
        assert self.experts is not None
        yield self.experts.slot(index)

    def bind(self, layer: LayerAssembly) -> None:
        """Lets the layer's modules read these bytes, once and for all."""
        layer.bind_dense(self.dense_shard)
        if self.experts is not None:
            slots = range(self.experts.num_slots)
            layer.set_experts(HeldExperts([layer.bind_expert(e, self.experts.slot(e)) for e in slots]))


class MemorySink:
    """Keeps every shard; `layers` is complete when the preparation is."""

    def __init__(self) -> None:
        self.layers: list[LayerBytes] = []
        self.head_shard: torch.Tensor | None = None

    def has_layer(self, index: int) -> bool:
        return False

    @contextmanager
    def layer(self, index: int, shards: LayerShards) -> Iterator[LayerBytes]:
        experts = Arena(shards.expert.nbytes, shards.num_experts) if shards.expert else None
        layer = LayerBytes(Arena(shards.dense.nbytes, 1).slot(0), experts)
        yield layer
        self.layers.append(layer)

    @contextmanager
    def head(self, nbytes: int) -> Iterator[torch.Tensor]:
        self.head_shard = Arena(nbytes, 1).slot(0)
        yield self.head_shard
