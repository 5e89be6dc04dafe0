"""Tries all Triton kernels at tiny sizes: which of them run on a GPU and compute correct results.

They are tried by family: where one does not compile, does not start or is wrong, the others stay in use. On a GPU
each is tried first in a process of its own (`isolated_trial`), since a kernel that reads beyond its memory ends every
CUDA call of its process. Those of experts are launched again once weights are loaded, in every variant that a job can
need: Triton compiles a kernel when it is first launched, which takes from a third of a second to more than one and is
better done before the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...moe.expert import ExpertWeights, ResidentExpert
from ...moe.groups import group_by_expert
from ...offload.device import Device
from ...offload.errors import is_out_of_memory
from ...quant.kernels import tuning
from ...quant.kernels.gpu import Gpu, Lacks, dotted, lack_of, triton_lack
from ...quant.kernels.tuning import TILE_ROWS
from ...quant.matmul.matmul import ParallelMatmul
from ...quant.tensor import TORCH_DTYPES
from ..attention.choice import LARGEST_HEAD
from ..model.assembly import LayerAssembly
from ..model.experts_seam import PackedExperts
from ..plan.planner import choose_dtype
from .isolated_trial import KernelNeeds, try_apart

_NO_TENSOR_CORES = "Triton uses tensor cores from compute capability {} on, this GPU has {}; matrices are widened whole"


def usual_needs(device: Device) -> KernelNeeds:
    """The needs of most models on this device."""
    return KernelNeeds(choose_dtype("auto", "bf16", Gpu(device.capability, device.processors)))


def try_kernels(device: Device, needs: KernelNeeds) -> Gpu:
    """Compiles and runs the kernels, which takes seconds unless Triton has cached them."""
    gpu = Gpu(device.capability, device.processors)
    if lack := triton_lack(gpu.capability):
        return gpu._replace(lacks=Lacks.everything(lack))
    # Imports Triton.
    trials = family_trials(device.torch_device, gpu, needs)
    lacks = {}
    if not tuning.supports(gpu.capability):
        lacks["experts"] = _NO_TENSOR_CORES.format(dotted(tuning.DOT_CAPABILITY), dotted(gpu.capability))
        del trials["experts"]
    if device.is_real:
        lacks |= {family: lack for family, lack in try_apart(device, needs, tuple(trials)).items() if lack}
    for family in (family for family in trials if family not in lacks):
        lacks[family] = lack_of(trials[family])
        if lacks[family]:
            # Else the next CUDA call would report it.
            device.clear_error()
    return gpu._replace(lacks=Lacks(**lacks))


def family_trials(torch_device: torch.device, gpu: Gpu, needs: KernelNeeds) -> dict[str, Callable[[], str]]:
    """The trials by family of `Lacks`. Modules are imported in the trials, which catch their errors."""
    dtype = TORCH_DTYPES[needs.dtype]
    heads = frozenset(head for head in needs.head_dims if head <= LARGEST_HEAD)

    def attention() -> str:
        from ..attention.trial import try_attention

        return try_attention(torch_device, gpu, dtype, heads)

    def cache() -> str:
        from ..attention.trial import try_storing

        return try_storing(torch_device, dtype, heads)

    def experts() -> str:
        from ...quant.kernels.trial import try_products

        return try_products(torch_device, dtype)

    return {"attention": attention, "cache": cache, "experts": experts}


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
