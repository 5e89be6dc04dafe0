"""What a run may use of the machine: sizes as people write them, and the bytes that they come to.

Torch-free, except for `Budgets.open`, which looks for a device and creates its context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...offload.budget import auto_device, auto_host, parse_size
from ...offload.machine.hardware import Hardware
from ...offload.memory import host_available, host_resident, host_total
from ...quant.kernels.gpu import Gpu, find_gpu
from .errors import SettingError

if TYPE_CHECKING:
    from ...offload.device import Device

MIB = 1 << 20
GIB = 1 << 30
# torch, transformers and bitsandbytes imported, threads started, before any model.
PROCESS_NBYTES = 576 * MIB
# What CUDA loads with its first kernels, in either memory: modules, handles and workspaces of cuBLAS.
LIBRARIES_NBYTES = 256 * MIB
# The most that a context takes, for plans that open no device (offload/device.py finds what it really takes).
ASSUMED_CONTEXT_NBYTES = 640 * MIB
WITHOUT_KERNELS = Gpu((0, 0), 1, "nothing is known of this GPU")


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """`nbytes` of a device's memory, of which the driver and libraries take `context_nbytes`.

    `process_nbytes` is what the process has taken of host memory with CUDA loaded. Kernels are chosen by `gpu`; where
    nothing is known of it, torch computes everything.
    """

    nbytes: int
    context_nbytes: int
    process_nbytes: int
    gpu: Gpu = WITHOUT_KERNELS


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The bytes that a run may use of every tier.

    `device` is None where the processor computes. `disk_nbytes` bounds the store of weights that stream from disk; None
    is as much as the store takes.
    """

    host_nbytes: int
    device: DeviceBudget | None = None
    disk_nbytes: int | None = None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of memory by tier, the fastest tier first."""
        device = {} if self.device is None else {"device": self.device.nbytes}
        return device | {"host": self.host_nbytes}

    def with_tier(self, tier: str, nbytes: int) -> MemoryBudget:
        """The same with another budget of "host" or "device" memory."""
        if tier == "host" or self.device is None:
            return replace(self, host_nbytes=nbytes)
        return replace(self, device=replace(self.device, nbytes=nbytes))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MemoryBudget:
        """The inverse of `dataclasses.asdict`. Raises TypeError or KeyError for anything else."""
        device = content["device"]
        if device is not None:
            capability, processors, lack = device["gpu"]
            device = DeviceBudget(**{**device, "gpu": Gpu(tuple(capability), processors, lack)})
        return cls(**{**content, "device": device})


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What budgets come to on this machine, and the device that computes; `device` is None on the processor."""

    budget: MemoryBudget
    device: Device | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Sizes as people write them; `disk` bounds all stores together, `disk_dir` is the folder of the stores."""

    ram: str = "auto"
    disk: str = "auto"
    disk_dir: Path | None = None
    gpu_mem: str = "auto"

    def open(self) -> MachineMemory:
        """Looks for a device, unless the budgets forbid it, and limits torch's allocator to its budget.

        Raises SettingError, BadSize.
        """
        host, disk = self.host_nbytes(), self.disk_nbytes()
        device = self._find_device()
        if device is None:
            return MachineMemory(MemoryBudget(host, None, disk))
        nbytes = parse_size(self.gpu_mem, device.total, device.available, auto_device)
        # Compiles and runs a kernel, which is part of what the process and the context take from here on.
        gpu = find_gpu(device.place, device.capability, device.processors)
        process = max(PROCESS_NBYTES, host_resident()) + LIBRARIES_NBYTES
        context = device.context_nbytes
        # What libraries will take is not the allocator's to give.
        device.limit(max(0, nbytes - context - LIBRARIES_NBYTES))
        granted = DeviceBudget(nbytes, context + LIBRARIES_NBYTES, process, gpu)
        return MachineMemory(MemoryBudget(host, granted, disk), device)

    def expected(self, hardware: Hardware, elsewhere: bool = False) -> MemoryBudget:
        """What they would come to on `hardware`, whose device is not opened: its context is taken to be large.

        `elsewhere` means another machine than this one, all of whose memory counts as available. Raises SettingError,
        BadSize.
        """
        ram = hardware.ram_nbytes
        host = parse_size(self.ram, ram, ram, auto_host) if elsewhere else self.host_nbytes()
        return MemoryBudget(host, self._expected_device(hardware), self.disk_nbytes())

    def host_nbytes(self) -> int:
        """Bytes of this machine's memory. Raises BadSize."""
        return parse_size(self.ram, host_total(), host_available())

    def disk_nbytes(self) -> int | None:
        """None for auto: what the store needs, minus a reserve. Raises BadSize."""
        return None if self.disk == "auto" else parse_size(self.disk, 0, 0)

    @property
    def _wants_device(self) -> bool:
        return self.gpu_mem.strip() != "0"

    def _find_device(self) -> Device | None:
        if not self._wants_device:
            return None
        # Imports torch.
        from ...offload.device import find_device

        device = find_device()
        if device is None:
            self._refuse_missing_device()
        return device

    def _expected_device(self, hardware: Hardware) -> DeviceBudget | None:
        """The budget of the first GPU."""
        if not self._wants_device:
            return None
        if not hardware.gpus:
            self._refuse_missing_device()
            return None
        total = hardware.gpus[0].nbytes
        nbytes = parse_size(self.gpu_mem, total, total, auto_device)
        return DeviceBudget(nbytes, ASSUMED_CONTEXT_NBYTES + LIBRARIES_NBYTES, PROCESS_NBYTES + LIBRARIES_NBYTES)

    def _refuse_missing_device(self) -> None:
        """Raises SettingError where a device was asked for: this machine has none."""
        if not self.gpu_mem.strip().lower().startswith("auto"):
            raise SettingError(
                f"--gpu-mem {self.gpu_mem} was asked for and CUDA finds no device here; "
                "give --gpu-mem 0 to compute on the processor, or look at `nvidia-smi`"
            )
