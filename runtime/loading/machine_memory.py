"""What budgets come to on this machine: host memory, and a device's where there is one, as they are found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ...offload.device import Device, find_device
from ...offload.errors import is_out_of_memory
from ...offload.machine.profile import Machine
from ...offload.memory import host_resident
from ...quant.kernels.gpu import Gpu
from ..plan.planner import choose_dtype
from ..settings.budgets import LIBRARIES_NBYTES, PROCESS_NBYTES, Budgets, DeviceBudget, MemoryBudget
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from .kernel_trial import KernelNeeds, try_kernels, usual_needs

_SIZE = 64
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def load_libraries(device: Device) -> None:
    """Makes cuBLAS's handle and workspace, one product in each dtype and one attention in each.

    The driver gives all of it memory that torch's allocator knows nothing of: used for the first time in a pass, it
    would come out of what a plan has given away.
    """
    for dtype in _DTYPES:
        try:
            _multiply(device.place, dtype)
            _attend(device.place, dtype)
        except RuntimeError as error:
            # What a GPU has no kernel for fails where it is wanted, with words of its own.
            if is_out_of_memory(error):
                raise
    device.synchronize()


def _multiply(place: torch.device, dtype: torch.dtype) -> None:
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype, device=place)
    torch.mm(matrix, matrix)


def _attend(place: torch.device, dtype: torch.dtype) -> None:
    heads = torch.ones(1, 2, _SIZE, _SIZE, dtype=dtype, device=place)
    functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What budgets come to on this machine, and the device that computes; `device` is None on the CPU."""

    budget: MemoryBudget
    device: Device | None = None

    def limit_pins(self, machine: Machine | None) -> None:
        """Leaves a fifth of what `machine` was found to page-lock to others."""
        if self.device is not None and machine is not None and machine.pin is not None:
            self.device.pins.most = machine.pin.usable


def open_memory(budgets: Budgets, settings: Settings | None = None, shape: ModelShape | None = None) -> MachineMemory:
    """Looks for a device, unless the budgets forbid it, and tries the kernels that a run of the model would take there.

    Torch's allocator is limited to the budget. Raises SettingError, BadSize.
    """
    host, disk = budgets.host_nbytes(), budgets.disk_nbytes()
    device = find_device() if budgets.wants_device else None
    if device is None:
        if budgets.wants_device:
            budgets.without_device()
        return MachineMemory(MemoryBudget(host, None, disk))
    nbytes = budgets.device_nbytes(device.total, device.available)
    # An earlier run of this process may have left a limit.
    device.limit(device.total)
    # What these two load, compile and run is part of what the process and the context take from here on.
    load_libraries(device)
    gpu = try_kernels(device, _needs(device, settings, shape))
    process = max(PROCESS_NBYTES, host_resident()) + LIBRARIES_NBYTES
    context = device.context_nbytes
    # What libraries will take is not the allocator's to give.
    device.limit(max(0, nbytes - context - LIBRARIES_NBYTES))
    granted = DeviceBudget(nbytes, context + LIBRARIES_NBYTES, process, gpu)
    return MachineMemory(MemoryBudget(host, granted, disk), device)


def _needs(device: Device, settings: Settings | None, shape: ModelShape | None) -> KernelNeeds:
    """Where no model is known yet, what most models take."""
    if settings is None or shape is None:
        return usual_needs(device)
    dtype = choose_dtype(settings.dtype, shape.dtype, Gpu(device.capability, device.processors))
    return KernelNeeds(dtype, frozenset(group.head_dim for group in shape.kv_groups))
