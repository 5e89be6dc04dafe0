"""From a checkpoint to packed shards, a layer at a time and a few experts at a time, into memory or into a store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from ..offload.checkpoint import Checkpoint
from ..quant.linear import Compute
from .model.assembly import LayerAssembly
from .model.loading import CheckpointLoader
from .model.packing import Packer
from .shape.shards import ModelShards, ShardLayout

# Bytes of experts, as the checkpoint has them, that are converted together: their stacked copy comes on top.
WINDOW_NBYTES = 128 << 20


class ShardSink(Protocol):
    """Where packed shards go. Each method gives uint8 bytes to fill, kept when the context is left without an error."""

    def dense(self, layer: int, nbytes: int) -> AbstractContextManager[torch.Tensor]: ...

    def experts(self, layer: int, count: int, nbytes: int) -> Callable[[int], AbstractContextManager[torch.Tensor]]:
        """For `count` experts of `nbytes` each: gives the bytes of one by its index."""
        ...

    def head(self, nbytes: int) -> AbstractContextManager[torch.Tensor]: ...


class Preparation:
    """Packs what the checkpoint holds into `sink`; afterwards the model has resident parameters and packed modules."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, packer: Packer, compute: Compute) -> None:
        self.layers: list[LayerAssembly] = []
        self._model = model
        self._loader = CheckpointLoader(model, checkpoint, model.dtype)
        self._packer = packer
        self._compute = compute

    def run(self, shards: ModelShards, sink: ShardSink) -> None:
        for index, layer in enumerate(self._model.get_decoder().layers):
            assembly = LayerAssembly(layer, shards.layers[index], self._compute)
            self._pack_dense(index, layer, assembly, sink)
            if assembly.experts is not None:
                self._pack_experts(index, assembly, sink)
            assembly.install()
            self.layers.append(assembly)
        self._loader.load_rest()
        if shards.head is not None:
            self._pack_head(shards.head, sink)

    def _pack_dense(self, index: int, layer: nn.Module, assembly: LayerAssembly, sink: ShardSink) -> None:
        self._loader.load_dense(index, layer)
        layout = assembly.shards.dense
        weights = [assembly.linears[placed.name].weight for placed in layout.matrices]
        with sink.dense(index, layout.nbytes) as shard:
            self._packer.pack(f"layer {index}", layout, weights, shard)

    def _pack_experts(self, index: int, assembly: LayerAssembly, sink: ShardSink) -> None:
        layout, count = assembly.shards.expert, assembly.shards.num_experts
        assert layout is not None
        place = sink.experts(index, count, layout.nbytes)
        numel = sum(rows * cols for rows, cols in (placed.layout.shape for placed in layout.matrices))
        window = max(1, WINDOW_NBYTES // (numel * self._model.dtype.itemsize))
        for begin in range(0, count, window):
            experts = range(begin, min(begin + window, count))
            up, down = self._loader.load_experts(index, assembly.experts, assembly.up_name, experts)
            for expert in experts:
                with place(expert) as shard:
                    weights = [up[expert - begin], down[expert - begin]]
                    self._packer.pack(f"layer {index} expert {expert}", layout, weights, shard)

    def _pack_head(self, layout: ShardLayout, sink: ShardSink) -> None:
        head = self._model.get_output_embeddings()
        with sink.head(layout.nbytes) as shard:
            self._packer.pack("output", layout, [head.weight], shard)
