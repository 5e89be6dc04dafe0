"""Identifies the hardware that a measurement is valid for: CPU, RAM, GPUs and driver, disk. Torch-free."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver. `cuda` is the newest CUDA version it supports, such as (13, 0); `release` is "" if unknown."""

    cuda: tuple[int, int]
    release: str = ""


def find_driver(library: Any = None, root: Path = Path("/")) -> Driver | None:
    """The installed driver; None if the library `libcuda.so.1` is missing or does not answer."""
    version = ctypes.c_int()
    cuda = library or load_driver()
    # 1000 x major + 10 x minor: cuDriverGetVersion in the CUDA driver API.
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) or version.value < 1000:
        return None
    return Driver((version.value // 1000, version.value % 1000 // 10), _release(root))


def shows_gpu(root: Path = Path("/")) -> bool:
    """Whether the machine shows a GPU that NVIDIA's driver would run: a display controller, or the one of WSL2."""
    if (root / "dev/dxg").exists():
        return True
    try:
        devices = list((root / "sys/bus/pci/devices").iterdir())
        return any(
            (each / "vendor").read_text().strip() == "0x10de" and (each / "class").read_text().startswith("0x03")
            for each in devices
        )
    except OSError:
        return False


def load_driver() -> Any:
    """The driver's library; None if it is not installed."""
    return _load("libcuda.so.1")


def _load(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
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
class GpuInfo:
    """One GPU: its memory in bytes, its compute capability such as "8.6", and its number of multiprocessors.

    `capability` is "" and `processors` is 0 if the driver does not report them.
    """

    name: str
    nbytes: int
    capability: str = ""
    processors: int = 0

    def __post_init__(self) -> None:
        if self.capability and not re.fullmatch(r"\d+\.\d+", self.capability):
            raise ValueError(f"a compute capability of {self.capability!r} was found; wanted one such as 8.6")


@dataclass(frozen=True, slots=True)
class Hardware:
    """`cores` counts those that this process may run on; `disk` is the device and file system of the weights folder."""

    cpu: str
    cores: int
    ram_nbytes: int
    gpus: tuple[GpuInfo, ...]
    disk: str


def find_hardware(folder: Path) -> Hardware:
    """Examines this machine; `folder` is where weights are kept and need not exist yet."""
    return Hardware(
        cpu=_cpu_model(Path("/proc/cpuinfo")),
        cores=len(os.sched_getaffinity(0)),
        ram_nbytes=int(psutil.virtual_memory().total),
        gpus=find_gpus(),
        disk=_device_of(nearest_existing(folder)),
    )


def find_gpus(driver: Any = None) -> tuple[GpuInfo, ...]:
    """The NVIDIA devices visible under CUDA_VISIBLE_DEVICES. Asks the driver's library and creates no context."""
    cuda = driver or load_driver()
    count = ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_gpu(cuda, ordinal) for ordinal in range(count.value))


class PcieLink(NamedTuple):
    """`gt_s` are the transfers per second of a lane, in billions: 8 for PCIe 3.0, and twice as many a generation."""

    lanes: int
    gt_s: float


@dataclass(frozen=True, slots=True)
class GpuState:
    """What is in use of a GPU: bytes that programs have taken, and its PCIe link beside the best that it can have.

    None is what the driver or the kernel does not report. The rate of an idle link is lower than under load.
    """

    gpu: GpuInfo
    taken_nbytes: int | None
    link: PcieLink | None
    best_link: PcieLink | None


def find_gpu_states(driver: Any = None, nvml: Any = None, root: Path = Path("/")) -> tuple[GpuState, ...]:
    """The states of `find_gpus`. Memory comes from the driver's management library, links from the kernel (sysfs)."""
    cuda, nvml = driver or load_driver(), nvml or _load("libnvidia-ml.so.1")
    states = []
    for ordinal, gpu in enumerate(find_gpus(cuda)):
        address = _pci_address(cuda, ordinal)
        folder = root / "sys/bus/pci/devices" / address.lower()
        states.append(GpuState(gpu, _taken(nvml, address), _link(folder, "current"), _link(folder, "max")))
    return tuple(states)


def _pci_address(cuda: Any, ordinal: int) -> str:
    """Such as 0000:01:00.0; "" if the driver does not report it."""
    handle, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    failed = cuda.cuDeviceGet(ctypes.byref(handle), ordinal) or cuda.cuDeviceGetPCIBusId(address, len(address), handle)
    return "" if failed else address.value.decode()


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_v2_t, whose `used` does not count what the driver reserves for itself."""

    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    )


def _taken(nvml: Any, address: str) -> int | None:
    if nvml is None or not address or nvml.nvmlInit_v2():
        return None
    handle, info = ctypes.c_void_p(), _MemoryInfo(version=ctypes.sizeof(_MemoryInfo) | 2 << 24)
    try:
        failed = nvml.nvmlDeviceGetHandleByPciBusId_v2(
            address.encode(), ctypes.byref(handle)
        ) or nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(info))
    except AttributeError:
        # Drivers before 510 have no second version.
        failed = 1
    nvml.nvmlShutdown()
    return None if failed else int(info.used)


def _link(folder: Path, which: str) -> PcieLink | None:
    """`which` is "current" or "max"; None where there is no such file, as under WSL2, or it says "Unknown"."""
    try:
        lanes = int((folder / f"{which}_link_width").read_text())
        return PcieLink(lanes, float((folder / f"{which}_link_speed").read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return None


def nearest_existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists."""
    resolved = folder.resolve()
    return next(path for path in (resolved, *resolved.parents) if path.is_dir())


def _gpu(cuda: Any, ordinal: int) -> GpuInfo:
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
    return GpuInfo(name.value.decode("utf-8", "replace"), nbytes.value, capability, processors)


def _attribute(cuda: Any, handle: ctypes.c_int, number: int) -> int:
    """An attribute of the device; 0 if the driver does not report it."""
    value = ctypes.c_int()
    return 0 if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle) else value.value


def _cpu_model(cpuinfo: Path) -> str:
    """The CPU model as the kernel names it; on ARM, where it names none, the architecture."""
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def _device_of(folder: Path) -> str:
    """Device and file system of the innermost mount; the last of several mounts on one path hides the others."""
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    inner = max(reversed(mounts), key=lambda part: len(part.mountpoint), default=None)
    return f"{inner.device} {inner.fstype}" if inner else "unknown"


# The most threads that compute experts in parallel. Between the operations of an expert they compete for Python's lock,
# for a tenth of the time or less; with more cores than this, each thread gets several of torch's threads instead.
MAX_WORKERS = 8


def num_threads() -> int:
    """The threads that products take on the CPU: one per core, unless OMP_NUM_THREADS says otherwise."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) else len(os.sched_getaffinity(0))


def gpu_text(granted: int, gpu: GpuInfo | None = None) -> str:
    """Says that a GPU computes, and how many bytes of it are granted: `the GPU (RTX 3060), 7.0 of 8.0 GiB granted`."""
    if gpu is None:
        return f"the GPU, {granted / 2**30:.1f} GiB granted"
    return f"the GPU ({gpu.name}), {granted / 2**30:.1f} of {gpu.nbytes / 2**30:.1f} GiB granted"


def cpu_text(threads: int, reason: str) -> str:
    """Says that the CPU computes, and why no GPU does: `the CPU (8 threads): no NVIDIA driver found`."""
    return f"the CPU ({threads} thread{'' if threads == 1 else 's'}): {reason}"


def num_workers() -> int:
    """The number of threads that compute in parallel, including the main one: one per core, at most MAX_WORKERS."""
    return min(MAX_WORKERS, num_threads())
