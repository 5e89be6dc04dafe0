"""One launch of every kernel that the grouped product of a matrix may take."""

from __future__ import annotations

import torch

from moedge.quant.formats.format import Layout
from moedge.quant.kernels.operands import Gate
from moedge.quant.kernels.product import GroupedProduct, Launch, RowTiles
from moedge.quant.kernels.tuning import TILE_ROWS, tile_rows
from moedge.quant.tensor import PackedTensor, torch_dtype


def warm_up_launches(
    product: GroupedProduct,
    layout: Layout,
    dtype: torch.dtype,
    *,
    bias: bool = False,
    gate: Gate | None = None,
    gathers: bool = False,
) -> list[Launch]:
    """One launch for every kernel that products of activations of `dtype` with matrices of this layout may take.

    `gathers` means that rows are given by token ids, as in the first of an expert's two products. The launches have no
    rows: they read no matrix and write nothing, so a few bytes replace the matrices, and they take microseconds once
    they are compiled.
    """
    device = product.device
    planes = tuple(torch.empty(16, dtype=torch_dtype(plane.dtype), device=device) for plane in layout.planes)
    matrix = PackedTensor(layout, planes)
    num_rows, num_columns = layout.shape
    x = torch.empty(1, num_columns, dtype=dtype, device=device)
    out = torch.empty(1, num_rows // 2 if gate else num_rows, dtype=dtype, device=device)
    token_ids = torch.zeros(1, dtype=torch.int64, device=device) if gathers else None
    biases = [torch.empty(16, dtype=dtype, device=device) if bias else None]
    tiles = torch.zeros(1, 3, dtype=torch.int32, device=device)
    wide = dtype == torch.float32
    heights = [tile_rows(1, wide)] if wide or product.deterministic else TILE_ROWS
    return [product.launch(x, out, [matrix], biases, RowTiles(tiles, height), token_ids, gate) for height in heights]
