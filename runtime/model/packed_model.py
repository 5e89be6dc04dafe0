"""A loaded model: transformers' definition over packed weights, one call per pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...offload.checkpoint import Checkpoint
from ...quant.linear import Compute
from ..attention.protocol import AttentionBackend
from ..batch import Batch
from ..shape.config import ModelConfig
from .attention_seam import PackedPass
from .definition import define
from .loading import CheckpointLoader
from .packing import Packer, WeightCensus
from .weights_seam import ArrivingLayers


class PackedModel:
    """`forward` runs a pass; `attention` must be set before the first one, once the cache has been sized."""

    def __init__(self, model: PreTrainedModel, census: WeightCensus) -> None:
        self._model = model
        self.census = census
        self.attention: AttentionBackend | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, V] of the batch's `logit_rows`, in fp32."""
        if self.attention is None:
            raise RuntimeError("no attention backend: set `attention` before the first pass")
        out = self._model(
            batch.token_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            packed=PackedPass(batch, self.attention),
        )
        logits: torch.Tensor = out.logits
        return logits.squeeze(0).float()


def load_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype, format_name: str, compute: Compute
) -> PackedModel:
    """Loads and packs layer by layer: memory peaks at the packed model and one layer of the checkpoint."""
    model = define(config, dtype)
    packer = Packer(format_name, compute)
    decoder = model.get_decoder()
    with Checkpoint(folder) as checkpoint:
        loader = CheckpointLoader(model, checkpoint, dtype)
        for index, layer in enumerate(decoder.layers):
            loader.load_layer(index, layer)
            packer.pack_layer(layer)
        loader.load_rest()
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    model.set_output_embeddings(packer.pack_head(head, tied))
    decoder.layers = ArrivingLayers(decoder.layers, lambda: _all_resident(len(decoder.layers)))
    return PackedModel(model.requires_grad_(False), packer.census)


def _all_resident(num_layers: int) -> Iterator[int]:
    """The order in which layers arrive when all of them are in memory."""
    yield from range(num_layers)
