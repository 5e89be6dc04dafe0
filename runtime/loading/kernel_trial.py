"""Tries all Triton kernels at tiny sizes: which of them run on a GPU and compute correct results.

They are tried by family: where one does not compile, does not start or is wrong, the others stay in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...offload.device import Device
from ...quant.kernels import tuning
from ...quant.kernels.gpu import Gpu, Lacks, dotted, lack_of, triton_lack
from ...quant.tensor import TORCH_DTYPES
from ..attention.choice import LARGEST_HEAD
from ..plan.planner import choose_dtype

_NO_TENSOR_CORES = "Triton uses tensor cores from compute capability {} on, this GPU has {}; matrices are widened whole"


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """What kernels are tried with: the dtype of a run and its head dimensions."""

    dtype: str
    head_dims: frozenset[int] = frozenset({128})


def usual_needs(device: Device) -> KernelNeeds:
    """The needs of most models on this device."""
    return KernelNeeds(choose_dtype("auto", "bf16", Gpu(device.capability, device.processors)))


def try_kernels(device: Device, needs: KernelNeeds) -> Gpu:
    """Compiles and runs the kernels, which takes seconds unless Triton has cached them."""
    gpu = Gpu(device.capability, device.processors)
    if lack := triton_lack(gpu.capability):
        return gpu._replace(lacks=Lacks.everything(lack))
    # Imports Triton.
    trials = _trials(device.torch_device, gpu, needs)
    lacks = {}
    for family, trial in trials.items():
        if family == "experts" and not tuning.supports(gpu.capability):
            lacks[family] = _NO_TENSOR_CORES.format(dotted(tuning.DOT_CAPABILITY), dotted(gpu.capability))
            continue
        lacks[family] = lack_of(trial)
        if lacks[family]:
            # Else the next CUDA call would report it.
            device.clear_error()
    return gpu._replace(lacks=Lacks(**lacks))


def _trials(torch_device: torch.device, gpu: Gpu, needs: KernelNeeds) -> dict[str, Callable[[], str]]:
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
