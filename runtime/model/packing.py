"""Packs loaded weights into the bytes of shards, and keeps count of what became what."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from ...offload.errors import BadCheckpoint
from ...quant.format import FormatError
from ...quant.tensor import pack_into
from ..shape.shards import PlacedMatrix, ShardLayout


@dataclass(slots=True)
class WeightCensus:
    """Bytes of weights by format: what was asked for, and what was packed in the end."""

    requested: Counter[str] = field(default_factory=Counter)
    packed: Counter[str] = field(default_factory=Counter)


class Packer:
    """`format_name` is what was asked for; the shards' layouts say what each matrix really gets."""

    def __init__(self, format_name: str) -> None:
        self.census = WeightCensus()
        self._format = format_name

    def pack(self, where: str, layout: ShardLayout, weights: list[torch.Tensor], shard: torch.Tensor) -> None:
        """Fills `shard`, uint8 [layout.nbytes], with `weights` in the layout's order, each [N, K]."""
        for placed, weight in zip(layout.matrices, weights, strict=True):
            self._pack(f"{where}.{placed.name}", placed, weight.detach(), shard[placed.offset : placed.end])
        if layout.matrices:
            shard[layout.matrices[-1].end :].zero_()

    def _pack(self, name: str, placed: PlacedMatrix, weight: torch.Tensor, buffer: torch.Tensor) -> None:
        self.census.requested[self._format] += weight.numel() * weight.element_size()
        self.census.packed[placed.layout.format] += placed.layout.nbytes
        try:
            pack_into(weight, placed.layout, buffer)
        except FormatError as error:
            raise BadCheckpoint(f"{name}: {error}") from None
