"""From a checkpoint to packed shards, a layer at a time and a few experts at a time, into memory or into a store."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from transformers import PreTrainedModel

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.errors import BadCheckpoint
from ...quant.linear import Compute
from ..model.assembly import LayerAssembly
from ..model.finite import refuse_nonfinite
from ..model.loading import CheckpointLoader
from ..model.packing import pack_shard
from ..plan.preparing import WINDOW_NBYTES
from ..shape.shards import LayerShards, ModelShards, ShardLayout


class LayerSink(Protocol):
    """Takes one layer's shards: uint8 bytes to fill, kept when the context is left without an error."""

    def dense(self) -> AbstractContextManager[torch.Tensor]: ...

    def expert(self, index: int) -> AbstractContextManager[torch.Tensor]: ...


class ShardSink(Protocol):
    """Where packed shards go, layer by layer, experts in order; `has_layer` ones are kept from an earlier run."""

    def has_layer(self, index: int) -> bool: ...

    def layer(self, index: int, shards: LayerShards) -> AbstractContextManager[LayerSink]: ...

    def head(self, nbytes: int) -> AbstractContextManager[torch.Tensor]: ...


class Preparation:
    """Packs what the checkpoint holds; then the model has resident parameters, and packed modules without bytes."""

    def __init__(
        self, model: PreTrainedModel, checkpoint: Checkpoint, compute: Compute, window_nbytes: int = WINDOW_NBYTES
    ) -> None:
        """`window_nbytes` of experts, as the checkpoint has them, are converted together; copies come on top."""
        self.layers: list[LayerAssembly] = []
        self._model = model
        self._checkpoint = checkpoint
        self._loader = CheckpointLoader(model, checkpoint, model.dtype)
        self._compute = compute
        self._window_nbytes = window_nbytes

    def run(self, shards: ModelShards, sink: ShardSink) -> None:
        self._loader.check()
        for index, layer in enumerate(self._model.get_decoder().layers):
            assembly = LayerAssembly(layer, shards.layers[index], self._compute)
            self._loader.load_dense(index, layer)
            if not sink.has_layer(index):
                with sink.layer(index, assembly.shards) as layer_sink:
                    self._pack_dense(index, assembly, layer_sink)
                    self._pack_experts(index, assembly, layer_sink)
            assembly.install()
            self.layers.append(assembly)
        self._loader.load_rest()
        refuse_nonfinite(self._model)
        if not self._checkpoint.unchanged():
            raise BadCheckpoint(f"{self._checkpoint.folder}: a weight file changed while it was read; start again")
        if shards.head is not None:
            self._pack_head(shards.head, sink)

    def _pack_dense(self, index: int, assembly: LayerAssembly, sink: LayerSink) -> None:
        layout = assembly.shards.dense
        weights = [assembly.linears[placed.name].weight for placed in layout.matrices]
        with sink.dense() as shard:
            pack_shard(f"layer {index}", layout, weights, shard)

    def _pack_experts(self, index: int, assembly: LayerAssembly, sink: LayerSink) -> None:
        layout, count = assembly.shards.expert, assembly.shards.num_experts
        if layout is None:
            return
        numel = sum(rows * cols for rows, cols in (placed.layout.shape for placed in layout.matrices))
        window = max(1, self._window_nbytes // (numel * self._model.dtype.itemsize))
        for begin in range(0, count, window):
            experts = range(begin, min(begin + window, count))
            up, down = self._loader.load_experts(index, assembly.experts, assembly.up_name, experts)
            for expert in experts:
                weights = [up[expert - begin], down[expert - begin]]
                with sink.expert(expert) as shard:
                    pack_shard(f"layer {index} expert {expert}", layout, weights, shard)

    def _pack_head(self, layout: ShardLayout, sink: ShardSink) -> None:
        head = self._model.get_output_embeddings()
        with sink.head(layout.nbytes) as shard:
            pack_shard("output", layout, [head.weight], shard)
