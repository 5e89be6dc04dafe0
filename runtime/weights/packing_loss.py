"""What weights of a quantized checkpoint lose where they are packed again in another format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from ...quant.formats.chunks import row_chunks
from ...quant.scratch import wide_columns
from ...quant.tensor import CODECS, PackedTensor


class PackingLoss:
    """Sums squares of weights and of their errors by group of tensors, such as experts."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, group: str, weight: Tensor, packed: PackedTensor) -> None:
        """`weight` [N, K] is what the checkpoint means and `packed` what was made of it."""
        layout, sums = packed.layout, self._sums[group]
        for rows in row_chunks(layout.shape, layout.row_block):
            exact = weight[rows].float()
            planes, made = packed.rows(rows), torch.empty_like(exact, memory_format=torch.contiguous_format)
            lines = -(-len(exact) // layout.row_block) * layout.row_block
            CODECS[layout.codes, layout.order].unpack(planes, made, exact.new_empty(lines, wide_columns(layout)))
            sums[0] += float(made.sub_(exact).square_().sum(dtype=torch.float64))
            sums[1] += float(exact.square_().sum(dtype=torch.float64))

    @property
    def by_group(self) -> Mapping[str, float]:
        """|packed - weight| / |weight|, in the L2 norm over all weights of a group; 0 for weights of 0."""
        return {group: sqrt(error / whole) if whole else 0.0 for group, (error, whole) in self._sums.items()}
