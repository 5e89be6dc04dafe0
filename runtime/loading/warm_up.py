"""Launches the GPU kernels of experts once weights are loaded, in every variant that a job can need.

Triton compiles a kernel when it is first launched, which takes from a third of a second to more than one and is better
done before the first row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...moe.expert import ExpertWeights, ResidentExpert, group_by_expert
from ...offload.device import Device
from ...offload.errors import is_out_of_memory
from ...quant.kernels.tuning import TILE_ROWS
from ...quant.matmul.matmul import ParallelMatmul
from ..model.assembly import LayerAssembly
from ..model.experts_seam import PackedExperts


@torch.inference_mode()
def warm_up_experts(
    layers: Sequence[LayerAssembly], compute: ParallelMatmul, dtype: torch.dtype, device: Device
) -> None:
    """Launches both expert kernels with every tile size, once for each kind of layer.

    Their weights are zeros in memory that is free now. If it is too little, the first passes compile the kernels.
    """
    if compute.grouped is None:
        return
    warmed = set()
    for layer in layers:
        shard = layer.shards.expert
        if shard is None:
            continue
        packed: PackedExperts = layer.experts.packed
        kind = (tuple(matrix.layout for matrix in shard.matrices), packed.body.gate, layer.experts.has_bias)
        if kind in warmed:
            continue
        warmed.add(kind)
        try:
            _compute_one(layer, packed, compute, dtype)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    device.give_back()


def _compute_one(layer: LayerAssembly, packed: PackedExperts, compute: ParallelMatmul, dtype: torch.dtype) -> None:
    shard = layer.shards.expert
    assert shard is not None
    torch_device = compute.device
    weights = bind_zeros(layer, shard.nbytes, torch_device)
    for num_rows in TILE_ROWS:
        hidden = torch.zeros(num_rows, weights.up.shape[1], dtype=dtype, device=torch_device)
        groups = group_by_expert(torch.zeros(num_rows, 1, dtype=torch.long, device=torch_device), 1)
        rows = torch.empty(groups.num_rows, hidden.shape[1], dtype=dtype, device=torch_device)
        packed.body.forward_together(hidden, rows, groups, [ResidentExpert(0, weights)], compute)


def bind_zeros(layer: LayerAssembly, nbytes: int, torch_device: torch.device) -> ExpertWeights:
    """An expert of the layer with new weights that are zero."""
    return layer.bind_expert(0, torch.zeros(nbytes, dtype=torch.uint8, device=torch_device))
