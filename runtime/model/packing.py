"""Packs loaded weights into the bytes of a shard."""

from __future__ import annotations

import torch

from ...offload.errors import BadCheckpoint
from ...quant.format import FormatError
from ...quant.tensor import pack_into
from ..shape.shards import ShardLayout


def pack_shard(where: str, layout: ShardLayout, weights: list[torch.Tensor], shard: torch.Tensor) -> None:
    """Fills `shard`, uint8 [layout.nbytes], with `weights` in the layout's order, each [N, K].

    Raises BadCheckpoint, naming the matrix, for weights that are NaN or infinite.
    """
    for placed, weight in zip(layout.matrices, weights, strict=True):
        try:
            pack_into(weight.detach(), placed.layout, shard[placed.offset : placed.end])
        except FormatError as error:
            raise BadCheckpoint(f"{where}.{placed.name}: {error}") from None
    if layout.matrices:
        # What lies between the last plane and the shard's end is written to disk and checked by its sum, too.
        shard[layout.matrices[-1].end :].zero_()
