"""Which kernels compute on this machine, tried with small products and by their self-tests instead of only imported."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...offload.device import Device
from ...offload.errors import swallow_cuda_error
from ...quant.formats import bitsandbytes_kernels
from ...quant.kernels.gpu import triton_lack
from ...quant.matmul.matmul import ParallelMatmul, Workspace, kernel_order
from ...quant.native import library
from ...quant.scratch import scratch_nbytes
from ...quant.tensor import dtype_name, pack
from ..plan.planner import dtype_notes
from .gpu_selftest import usable_kernels, usual_needs


class CpuKernels(NamedTuple):
    """The instruction set of the library of CPU kernels, or why it is not used; `build` is the command to build it."""

    isa: str
    unavailable_reason: str
    build: str


class GpuKernels(NamedTuple):
    """What the first GPU is not used for, as notes on dtypes; why Triton does not serve it, or else the families of
    kernels that passed their self-tests, and the reasons of those that did not."""

    notes: tuple[str, ...]
    unavailable_reason: str
    passed: list[str]
    failed: dict[str, str]


def cpu_kernels() -> CpuKernels:
    reason = library.lack()
    return CpuKernels("" if reason else library.loaded().isa, reason, library.BUILD)


def gpu_kernels(device: Device) -> GpuKernels:
    """Compiles and runs the kernels of every family on the GPU, as a run does before its plan."""
    gpu = usable_kernels(device, usual_needs(device))
    failed = dict(gpu.lacks.reasons)
    passed = [family for family in gpu.lacks._fields if family not in failed]
    return GpuKernels(tuple(dtype_notes("auto", "bf16", gpu)), triton_lack(gpu.capability), passed, failed)


@torch.inference_mode()
def product_error(format_name: str, device: str) -> float:
    """Worst difference of a 64x64 product in bfloat16 from the float64 one, relative to its largest number.

    `device` is "cpu" or "cuda". Raises what the kernel raises.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    try:
        packed = pack(weight, format_name, kernel_order(format_name, x.dtype, device))
        meant = x.double() @ packed.dequantize().double().t()
        there = type(packed)(packed.layout, tuple(plane.to(device) for plane in packed.planes))
        nbytes = scratch_nbytes(packed.layout, dtype_name(x.dtype), deterministic=False)
        got = ParallelMatmul(Workspace(nbytes, device)).linear(x.to(device), there).cpu().double()
    except Exception:
        swallow_cuda_error()
        raise
    return float((got - meant).abs().max() / meant.abs().max())


def bitsandbytes_speed(device: str) -> str:
    """ "fused" where its nf4 kernel multiplies a few rows without widening them, "slow" where it was built without this
    device, else "plain"."""
    if not bitsandbytes_kernels.serves(device):
        return "slow"
    return "fused" if device == "cuda" or bitsandbytes_kernels.has_fused() else "plain"
