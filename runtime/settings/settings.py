"""How a model is to be computed, and within what memory: what the user fixes, sizes as users write them with their
bytes on this machine, and what is left to the planner. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ...offload.budget import BadSize, auto_device, auto_host, gib, parse_size
from ...offload.machine.hardware import Hardware, find_driver
from ...offload.memory import host_available, host_total
from ...quant.kernels.gpu import Gpu, Lacks
from .errors import SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The planner decides what is "auto" or None; it keeps every other value as it is.

    `dtype` is the dtype to compute in, `quant` the format of the weights, `kv` that of keys and values. `compute`
    "int8" rounds activations, too, and multiplies as integers, which takes weights in int8 or 4 bits; "float" does not.
    `speculate` "off" drafts no tokens, "mtp" those of the checkpoint's own head, "auto" these where they pay. `host_kv`
    is how much host memory may hold keys and values beyond a device's: a size, which may be a share of the host's
    budget, or "off". Raises BadSize for anything else. `cpu_experts` "off" computes all experts on the device,
    `cpu_attention` "off" all attention.
    """

    dtype: str = "auto"
    quant: str = "auto"
    kv: str = "auto"
    tokens_per_pass: int | None = None
    max_sequences: int | None = None
    deterministic: bool = False
    compute: str = "auto"
    attention: str = "auto"
    speculate: str = "auto"
    host_kv: str = "auto"
    cpu_experts: str = "auto"
    cpu_attention: str = "auto"

    def __post_init__(self) -> None:
        self.host_kv_nbytes(1 << 62)

    def host_kv_nbytes(self, host_nbytes: int) -> int:
        """Bytes of a host's budget that keys and values may take; `auto` is all of it."""
        if self.host_kv == "off":
            return 0
        try:
            return parse_size(self.host_kv, host_nbytes, host_nbytes, lambda available: available)
        except BadSize as error:
            raise BadSize(f"--host-kv takes a size or off: {error}") from None


MIB = 1 << 20
# torch and transformers imported as runtime/model does, threads started, before any model.
PROCESS_NBYTES = 480 * MIB
# Triton's compiler, which torch's imports where there is a driver; without one runtime/model hides it.
TRITON_NBYTES = 96 * MIB
# torch's builds for CUDA take more of it, also where no GPU computes: 316 MiB with torch 2.11 for CUDA 13.
_CUDA_BUILD_NBYTES = 320 * MIB
# What CUDA loads with its first kernels, in either memory: modules, handles and workspaces of cuBLAS.
LIBRARIES_NBYTES = 256 * MIB
# The most that a context takes, for plans that open no device (offload/device.py finds what it really takes).
ASSUMED_CONTEXT_NBYTES = 640 * MIB
WITHOUT_KERNELS = Gpu((0, 0), 1, Lacks.everything("its kernels were never tried on this GPU; run `moedge doctor`"))


@cache
def process_nbytes() -> int:
    """Host memory of a process that computes on the CPU, before any model, with the torch and the driver found here."""
    found = find_spec("torch")
    folders = [] if found is None else found.submodule_search_locations or []
    built = any((Path(each) / "lib" / "libtorch_cuda.so").is_file() for each in folders)
    return PROCESS_NBYTES + (_CUDA_BUILD_NBYTES if built else 0) + (TRITON_NBYTES if find_driver() else 0)


# A prompt of more UTF-8 bytes is counted piece by piece before it is encoded whole, and refused where it has more than
# so many for each token that it may have.
ENCODED_NBYTES, TEXT_NBYTES_PER_TOKEN = 64 << 10, 16
# What tokenizers takes for each byte of a text at most: offsets, alignments, words; for long tokens half of it.
_ENCODER_FACTOR = 300


def encoder_nbytes(tokens: int) -> int:
    """Host memory that encoding one prompt takes, where none of more than `tokens` runs."""
    return _ENCODER_FACTOR * max(ENCODED_NBYTES, TEXT_NBYTES_PER_TOKEN * tokens // 2)


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """`nbytes` of GPU memory; the driver and libraries take `context_nbytes` of them.

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

    `device` is None if the CPU computes. `disk_nbytes` bounds the store of weights that stream from disk; None
    is as much as the store takes. The process has
    `taken_nbytes` of host memory already, which counts where it is more than `process_nbytes()` expects.
    """

    host_nbytes: int
    device: DeviceBudget | None = None
    disk_nbytes: int | None = None
    taken_nbytes: int = 0

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of memory by tier, the fastest tier first."""
        device = {} if self.device is None else {"device": self.device.nbytes}
        return device | {"host": self.host_nbytes}

    def beside(self, resident: int) -> MemoryBudget:
        """The same for a process that has `resident` bytes of host memory before it loads anything."""
        device = self.device and replace(self.device, process_nbytes=max(self.device.process_nbytes, resident))
        return replace(self, device=device, taken_nbytes=resident)

    def with_tier(self, tier: str, nbytes: int) -> MemoryBudget:
        """The same with another budget of "host" or "device" memory."""
        if tier == "host" or self.device is None:
            return replace(self, host_nbytes=nbytes)
        return replace(self, device=replace(self.device, nbytes=nbytes))


def within(option: str, text: str, nbytes: int, total: int) -> int:
    """`nbytes`, which `text` means. Raises BadSize where the machine has less: the kernel would end such a job."""
    if nbytes > total:
        owner = "the GPU" if option == "--gpu-mem" else "this machine"
        raise BadSize(f"{option} {text} is more than {owner} has ({gib(total)}); give at most {total // MIB}MiB")
    return nbytes


def wants_device(gpu_mem: str) -> bool:
    """Whether a GPU may compute under a budget of this text."""
    return gpu_mem.strip() != "0"


def without_device(gpu_mem: str) -> None:
    """Raises SettingError where a budget of this text asks for a device: this machine has none."""
    if wants_device(gpu_mem) and not gpu_mem.strip().lower().startswith("auto"):
        raise SettingError(
            f"--gpu-mem {gpu_mem} was asked for and CUDA finds no device here; "
            "give --gpu-mem 0 to compute on the CPU, or check `nvidia-smi`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Sizes as people write them; `disk` bounds all stores together, `disk_dir` is the folder of the stores."""

    ram: str = "auto"
    disk: str = "auto"
    disk_dir: Path | None = None
    gpu_mem: str = "auto"

    def expected(
        self, hardware: Hardware, tried: Mapping[str, str] | None = None, *, elsewhere: bool = False
    ) -> MemoryBudget:
        """The bytes of the budgets on `hardware`, whose device is not opened: its context is assumed to be large.

        `tried` says why kernels of its GPU do not run, by family; None where they were never tried.
        `elsewhere` means another machine than this one, all of whose memory counts as available. Raises SettingError,
        BadSize.
        """
        ram = hardware.ram_nbytes
        host = parse_size(self.ram, ram, ram, auto_host) if elsewhere else self.host_nbytes()
        return MemoryBudget(host, self._expected_device(hardware, tried, elsewhere), self.disk_nbytes())

    def on_cpu(self) -> MemoryBudget:
        """The bytes of the budgets where no device computes. Raises SettingError where one is asked for, BadSize."""
        without_device(self.gpu_mem)
        return MemoryBudget(self.host_nbytes(), None, self.disk_nbytes())

    def host_nbytes(self) -> int:
        """Bytes of this machine's memory. Raises BadSize, where there is less, too."""
        return within("--ram", self.ram, parse_size(self.ram, host_total(), host_available()), host_total())

    def device_nbytes(self, total: int, available: int) -> int:
        """Bytes of a device's memory. Raises BadSize, where there is less, too."""
        return within("--gpu-mem", self.gpu_mem, parse_size(self.gpu_mem, total, available, auto_device), total)

    def disk_nbytes(self) -> int | None:
        """None for auto: what the store needs, minus a reserve. Raises BadSize."""
        return None if self.disk == "auto" else parse_size(self.disk, 0, 0)

    @property
    def wants_device(self) -> bool:
        return wants_device(self.gpu_mem)

    def _expected_device(
        self, hardware: Hardware, tried: Mapping[str, str] | None, elsewhere: bool
    ) -> DeviceBudget | None:
        """The budget of the first GPU."""
        if not self.wants_device:
            return None
        if not hardware.gpus:
            without_device(self.gpu_mem)
            return None
        first = hardware.gpus[0]
        nbytes = self.device_nbytes(first.nbytes, first.nbytes)
        gpu = WITHOUT_KERNELS._replace(processors=max(1, first.processors))
        if first.capability:
            major, minor = first.capability.split(".")
            gpu = gpu._replace(capability=(int(major), int(minor)))
        if tried is not None:
            gpu = gpu._replace(lacks=Lacks(*(tried.get(family, "") for family in Lacks._fields)))
        context = ASSUMED_CONTEXT_NBYTES + LIBRARIES_NBYTES
        return DeviceBudget(nbytes, context, PROCESS_NBYTES + TRITON_NBYTES + LIBRARIES_NBYTES, gpu)
