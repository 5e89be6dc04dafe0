"""Which machine this is: what a measurement stays valid for. Torch-free."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .driver import load_driver

# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, its _MINOR and CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
_ATTRIBUTES = (75, 76, 16)


@dataclass(frozen=True, slots=True)
class Gpu:
    """`capability` is of its arithmetic, as "8.6"; `processors` run blocks of threads side by side. "" and 0 where the
    driver does not say."""

    name: str
    nbytes: int
    capability: str = ""
    processors: int = 0

    def __post_init__(self) -> None:
        if self.capability and not re.fullmatch(r"\d+\.\d+", self.capability):
            raise ValueError(f"a compute capability of {self.capability!r} was found; wanted one such as 8.6")


@dataclass(frozen=True, slots=True)
class Hardware:
    """`cores` are those this process may run on, `disk` the device and file system of the folder for weights."""

    cpu: str
    cores: int
    ram_nbytes: int
    gpus: tuple[Gpu, ...]
    disk: str


def find_hardware(folder: Path) -> Hardware:
    """`folder` need not exist yet."""
    return Hardware(
        cpu=_cpu_model(Path("/proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)),
        ram_nbytes=int(psutil.virtual_memory().total),
        gpus=find_gpus(),
        disk=_device_of(nearest_existing(folder)),
    )


def find_gpus(driver: Any = None) -> tuple[Gpu, ...]:
    """The NVIDIA devices that CUDA_VISIBLE_DEVICES leaves visible. Asks the driver's library: no context is made."""
    cuda = driver or load_driver()
    count = ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_gpu(cuda, ordinal) for ordinal in range(count.value))


def nearest_existing(folder: Path) -> Path:
    resolved = folder.resolve()
    return next(place for place in (resolved, *resolved.parents) if place.is_dir())


def _gpu(cuda: Any, ordinal: int) -> Gpu:
    handle, name, nbytes = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    failed = (
        cuda.cuDeviceGet(ctypes.byref(handle), ordinal)
        or cuda.cuDeviceGetName(name, len(name), handle)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), handle)
    )
    if failed:
        raise OSError(f"the NVIDIA driver lists device {ordinal} but does not describe it (CUDA error {failed})")
    major, minor, processors = (_attribute(cuda, handle, number) for number in _ATTRIBUTES)
    capability = f"{major}.{minor}" if major else ""
    return Gpu(name.value.decode("utf-8", "replace"), nbytes.value, capability, processors)


def _attribute(cuda: Any, handle: ctypes.c_int, number: int) -> int:
    """0 where the driver does not answer."""
    value = ctypes.c_int()
    return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle) else value.value


def _cpu_model(cpuinfo: Path) -> str:
    """The model that the kernel names; on ARM, which names none, the architecture."""
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def _device_of(folder: Path) -> str:
    """Device and file system of the innermost mount; the last of several on one place hides the others."""
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    inner = max(reversed(mounts), key=lambda part: len(part.mountpoint), default=None)
    return f"{inner.device} {inner.fstype}" if inner else "unknown"
