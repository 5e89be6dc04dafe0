"""Resolves budgets on this machine: host memory, and a device's memory where one is found."""

from __future__ import annotations

import torch
from torch.nn import functional

from ...offload.device import Device, find_device
from ...offload.errors import is_out_of_memory
from ...offload.machine.profile import Machine
from ...offload.memory import host_resident
from ...quant.kernels.gpu import Gpu
from ..plan.planner import choose_dtype
from ..settings.settings import (
    LIBRARIES_NBYTES,
    PROCESS_NBYTES,
    TRITON_NBYTES,
    Budgets,
    DeviceBudget,
    MemoryBudget,
    Settings,
)
from ..shape.model_shape import ModelShape
from .selftest import KernelNeeds, usable_kernels, usual_needs

_SIZE = 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_libraries(device: Device) -> None:
    """Computes one product and one attention in each dtype, which load cuBLAS with its workspace and kernels.

    They take memory that torch's allocator does not know: if a pass loaded them, it would exceed the plan.
    """
    for dtype in _DTYPES:
        try:
            matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device.torch_device)
            torch.mm(matrix, matrix)
            heads = torch.ones(1, 2, _SIZE, _SIZE, dtype=dtype, device=device.torch_device)
            functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        except RuntimeError as error:
            # A missing kernel raises its own error where it is needed.
            if is_out_of_memory(error):
                raise
    device.synchronize()


def limit_pins(device: Device | None, machine: Machine | None) -> None:
    """Limits the memory that is page-locked for `device` to the part of what `machine` allows that leaves a fifth to
    others."""
    if device is not None and machine is not None and machine.pin is not None:
        device.pins.most = machine.pin.usable


def budget_of(device: Device, nbytes: int, gpu: Gpu) -> DeviceBudget:
    """A budget of `nbytes` of the device, with what the context and the process take now, and libraries will."""
    process = max(PROCESS_NBYTES + TRITON_NBYTES, host_resident()) + LIBRARIES_NBYTES
    return DeviceBudget(nbytes, device.context_nbytes + LIBRARIES_NBYTES, process, gpu)


def open_memory(
    budgets: Budgets, settings: Settings | None = None, shape: ModelShape | None = None
) -> tuple[MemoryBudget, Device | None]:
    """The budgets in bytes on this machine, and the device that computes; None on a CPU.

    Looks for a device, unless the budgets forbid it, tries the kernels that a run of the model would use there, and
    limits torch's allocator to the budget. Raises SettingError, BadSize.
    """
    device = find_device() if budgets.wants_device else None
    if device is None:
        return budgets.on_cpu(), None
    nbytes = budgets.device_nbytes(device.total, device.available)
    # An earlier run of this process may have left a limit.
    device.limit(device.total)
    # What these two load and compile counts as memory of the process and of the CUDA context from now on.
    load_libraries(device)
    gpu = usable_kernels(device, _needs(device, settings, shape))
    granted = budget_of(device, nbytes, gpu)
    # The allocator must leave what libraries will take.
    device.limit(max(0, nbytes - granted.context_nbytes))
    return MemoryBudget(budgets.host_nbytes(), granted, budgets.disk_nbytes()), device


def _needs(device: Device, settings: Settings | None, shape: ModelShape | None) -> KernelNeeds:
    """The needs of the model; where none is known yet, those of most models."""
    if settings is None or shape is None:
        return usual_needs(device)
    dtype = choose_dtype(settings.dtype, shape.dtype, Gpu(device.capability, device.processors))
    return KernelNeeds.of_model(shape, dtype)
