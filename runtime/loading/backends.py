"""Builds the compute backends of a plan: products with their scratch, threads and kernels, and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...offload.device import Device
from ...offload.machine.hardware import num_workers
from ...quant.kernels.gpu import INTERPRETER, Gpu
from ...quant.matmul.gemv import measure_gemv_max_rows
from ...quant.matmul.matmul import ParallelMatmul, Workspace
from ...quant.tensor import TORCH_DTYPES
from ..attention.latent import LatentAttention
from ..attention.protocol import AttentionBackend
from ..attention.torch_backend import TorchAttention
from ..kv.cache import KVCache
from ..plan.placement import Plan
from ..shape.model_shape import ModelShape
from ..shape.shards import helper_nbytes, workspace_nbytes

if TYPE_CHECKING:
    from ...quant.kernels.product import GroupedProduct


def make_compute(shape: ModelShape, plan: Plan, torch_device: torch.device) -> ParallelMatmul:
    """The products that the plan names, with their scratch and threads."""
    sizes = (shape, plan.quant, plan.dtype, plan.deterministic)
    # Experts are computed in parallel, and so are the strips of deterministic products; a dense model's other products
    # use all threads each. A device is one queue of work, which more threads would not fill faster.
    shared = plan.deterministic or any(layer.experts for layer in shape.layers)
    helpers = num_workers() - 1 if shared and torch_device.type == "cpu" else 0
    return ParallelMatmul(
        Workspace(workspace_nbytes(*sizes), torch_device),
        deterministic=plan.deterministic,
        integer=plan.compute == "int8",
        gemv_max_rows=measure_gemv_max_rows(plan.quant),
        helpers=[Workspace(helper_nbytes(*sizes)) for _ in range(min(helpers, torch.get_num_threads() - 1))],
        grouped=_grouped(torch_device, plan.deterministic) if plan.grouped_experts else None,
    )


def make_attention(cache: KVCache, plan: Plan, device: Device | None) -> AttentionBackend:
    """The attention backend that the plan names; without a device Triton's kernels run in its interpreter."""
    torch_device = device.torch_device if device else torch.device("cpu")
    dtype, tiled = TORCH_DTYPES[plan.dtype], plan.deterministic
    if any(pool.spec.group.is_latent for pool in cache.pools):
        return LatentAttention(cache, dtype, tiled, torch_device)
    if plan.attention == "torch" and not plan.stores_by_kernel:
        return TorchAttention(cache, dtype, tiled, torch_device)
    # Imports Triton, which takes a second and which some machines do not have.
    from ..attention.triton_backend import TritonAttention, store_by_kernel

    if plan.attention == "torch":
        return TorchAttention(cache, dtype, tiled, torch_device, store_by_kernel)
    gpu = Gpu(device.capability, device.processors) if device else INTERPRETER
    return TritonAttention(cache, dtype, tiled, gpu, torch_device, plan.stores_by_kernel)


def _grouped(torch_device: torch.device, deterministic: bool) -> GroupedProduct:
    from ...quant.kernels.product import GroupedProduct

    return GroupedProduct(torch_device, deterministic)
