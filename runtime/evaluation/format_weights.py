"""Gives a reference model the weights that a format makes of a checkpoint's, by the definition of the format in torch.

What an engine computes with packed weights is compared with them, not with weights that it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...quant.formats.format import INTEGER_CODES, PACK_CHUNK, TILE_COLUMNS, TILES, Layout, row_chunks
from ...quant.matmul.selftest import definition, rounded
from ...quant.tensor import CODECS, bind_cleared, torch_dtype
from ..shape.shards import ModelShards, ShardMatrix


class FormatWeights(TorchFunctionMode):
    """The matrices of a model in the formats of `shards`, a layer at a time.

    While entered, products with the matrices that were set last round activations to int8 if `integer`. Matrices
    whose codes are the checkpoint's, and those that are not packed, stay as they are.
    """

    def __init__(self, shards: ModelShards, integer: bool) -> None:
        super().__init__()
        self._shards, self._integer = shards, integer
        # The columns of a row that share a scale, by the address of the matrix.
        self._columns: dict[int, int] = {}

    def set_dense(self, index: int, layer: nn.Module) -> None:
        """Replaces the weights of a layer's linears, which are in memory; those of other layers are no longer known."""
        self._columns.clear()
        for matrix in self._shards.layers[index].dense.matrices:
            linear: Any = layer.get_submodule(matrix.name)
            self._set([linear.weight], matrix)

    def set_experts(self, index: int, experts: Any, up_name: str) -> None:
        """Replaces the experts that are in memory, [n, N, K], or [n, K, N] where the module is transposed."""
        shard = self._shards.layers[index].expert
        assert shard is not None
        for name, matrix in zip((up_name, "down_proj"), shard.matrices, strict=True):
            stack = getattr(experts, name)
            self._set([each.t() if experts.is_transposed else each for each in stack], matrix)

    def set_head(self, head: nn.Module) -> None:
        """Replaces the weight of an output head that is not tied to the embedding."""
        self._columns.clear()
        if self._shards.head is not None:
            linear: Any = head
            self._set([linear.weight], self._shards.head.matrices[0])

    def _set(self, weights: Sequence[Tensor], matrix: ShardMatrix) -> None:
        layout, columns = matrix.layout, 0
        if self._integer and layout.codes in INTEGER_CODES and (layout.order == TILES or not layout.grouped):
            columns = TILE_COLUMNS if layout.order == TILES else layout.shape[1]
        for weight in weights:
            if not matrix.kept and layout.format != "none":
                with torch.no_grad():
                    weight.copy_(as_packed(weight, layout))
            self._columns[weight.untyped_storage().data_ptr()] = columns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Rounds the argument in front of a matrix."""
        for at, each in enumerate(args[1:]):
            if isinstance(each, Tensor) and isinstance(args[at], Tensor) and args[at].is_floating_point():
                columns = self._columns.get(each.untyped_storage().data_ptr(), 0)
                if columns and args[at].shape[-1] % columns == 0:
                    x = args[at].reshape(-1, args[at].shape[-1])
                    args = (*args[:at], rounded(x, columns).view_as(args[at]), *args[at + 1 :])
        return func(*args, **(kwargs or {}))


def as_packed(weight: Tensor, layout: Layout) -> Tensor:
    """The float32 matrix [N, K] that its codes stand for when it is packed by torch."""
    packed = bind_cleared(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    for rows in row_chunks(layout.shape, layout.row_block, PACK_CHUNK):
        part = weight[rows].to(torch_dtype(layout.dtype))
        CODECS[layout.codes, layout.order].pack(part, packed.rows(rows))
    return definition(packed)
