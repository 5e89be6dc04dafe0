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


@dataclass(frozen=True, slots=True)
class Driver:
    """`cuda` is the newest CUDA version it serves, as (13, 0); `release` is empty where the kernel does not say."""

    cuda: tuple[int, int]
    release: str = ""


def find_driver(library: Any = None, root: Path = Path("/")) -> Driver | None:
    """None where the library `libcuda.so.1` is not there or does not answer."""
    version = ctypes.c_int()
    cuda = library or load_driver()
    # 1000 x major + 10 x minor: cuDriverGetVersion in the CUDA driver API.
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) or version.value < 1000:
        return None
    return Driver((version.value // 1000, version.value % 1000 // 10), _release(root))


def load_driver() -> Any:
    """The driver's library, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _release(root: Path) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,4}(?:\.\d+)+)\b", text)
    return found[1] if found else ""


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


# Threads that compute experts side by side. They take turns at Python between the operations of an expert, for a tenth
# of its time or less; from here on each gets several of torch's threads instead.
MAX_CREW = 8


def crew_size() -> int:
    """Threads that compute side by side, the main one among them: one per core, as far as they do not queue up."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(wanted) if wanted.isdigit() and int(wanted) else len(os.sched_getaffinity(0))
    return min(MAX_CREW, cores)
