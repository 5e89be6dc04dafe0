"""Launches the kernels of a device once after loading, in every variant that a job can ask for.

Triton compiles a kernel when it is first launched, which takes from a third of a second to more than one: better before
the first row than in the middle of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...moe.expert import ExpertWeights, ResidentExpert
from ...moe.groups import group_by_expert
from ...offload.device import Device
from ...offload.errors import is_out_of_memory
from ...quant.kernels.tuning import TILE_ROWS
from ...quant.matmul.parallel import ParallelMatmul
from ..model.assembly import LayerAssembly
from ..model.experts_seam import PackedExperts


@torch.inference_mode()
def warm_up_experts(
    layers: Sequence[LayerAssembly], compute: ParallelMatmul, dtype: torch.dtype, device: Device
) -> None:
    """Both launches of experts, in every size of tiles, for layers whose experts differ.

    With weights of no meaning in memory that is free now. Where there is too little of it, the first passes compile.
    """
    if compute.grouped is None:
        return
    warmed = set()
    for layer in layers:
        shard = layer.shards.expert
        if shard is None:
            continue
        packed: PackedExperts = layer.experts.packed
        kind = (tuple(placed.layout for placed in shard.matrices), packed.body.gate, layer.experts.has_bias)
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
    place = compute.device
    weights = bind_somewhere(layer, shard.nbytes, place)
    for num_rows in TILE_ROWS:
        hidden = torch.zeros(num_rows, weights.up.shape[1], dtype=dtype, device=place)
        groups = group_by_expert(torch.zeros(num_rows, 1, dtype=torch.long, device=place), 1)
        rows = torch.empty(groups.num_rows, hidden.shape[1], dtype=dtype, device=place)
        packed.body.forward_together(hidden, rows, groups, [ResidentExpert(0, weights)], compute)


def bind_somewhere(layer: LayerAssembly, nbytes: int, place: torch.device) -> ExpertWeights:
    """An expert of the layer over memory that is nobody's."""
    return layer.bind_expert(0, torch.zeros(nbytes, dtype=torch.uint8, device=place))
