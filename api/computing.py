"""Which device computes here: what torch was built for, beside what the driver serves; and settings of the process that
must precede the import of torch: how threads wait, the size of memory pages, how many compiled products oneDNN keeps,
and how torch's allocator takes GPU memory. Torch-free.
"""

import ast
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .offload.budget import auto_device, parse_size
from .offload.machine.hardware import (
    Driver,
    GpuInfo,
    cpu_text,
    find_driver,
    find_gpus,
    gpu_text,
    num_threads,
    shows_gpu,
)
from .runtime.settings.settings import wants_device, without_device


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """`cuda` is the CUDA version it was built with, None for a build that has none."""

    version: str
    cuda: tuple[int, int] | None


def find_torch() -> TorchBuild | None:
    """Reads its version.py, which an import would take two seconds for; None where torch is not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    values = _constants(Path(spec.origin).with_name("version.py").read_text())
    cuda = values.get("cuda")
    return TorchBuild(values.get("__version__") or "", _version_pair(cuda) if cuda else None)


def unusable_torch(torch: TorchBuild | None, driver: Driver) -> str:
    """Why torch cannot use a GPU of this driver; "" if it can."""
    if torch is None:
        return "torch is not installed"
    if torch.cuda is None:
        return f"torch {torch.version} cannot use the GPU: it was built without CUDA"
    # Within a major version an older driver serves newer builds: CUDA's minor version compatibility.
    if torch.cuda[0] > driver.cuda[0]:
        return f"torch {torch.version} was built for CUDA {dotted(torch.cuda)}"
    return ""


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes on a machine. `gpu` is None if the CPU does; then `reason` says why no GPU does."""

    gpu: GpuInfo | None
    reason: str = ""

    def line(self, granted: int = 0) -> str:
        """A line for the head of a command; `granted` are the bytes of the GPU that may be used."""
        where = cpu_text(num_threads(), self.reason) if self.gpu is None else gpu_text(granted, self.gpu)
        return f"computing on {where}"


_MORE = "; `moedge doctor` says more"


def find_computing(wants_gpu: bool = True) -> Computing:
    """What would compute on this machine; imports no torch and opens no device."""
    if not wants_gpu:
        return Computing(None, "--gpu-mem 0")
    driver = find_driver()
    gpus = find_gpus() if driver else ()
    return choose_computing(find_torch(), driver, gpus, undriven=driver is None and shows_gpu())


def choose_computing(
    torch: TorchBuild | None, driver: Driver | None, gpus: Sequence[GpuInfo], undriven: bool = False
) -> Computing:
    """The first GPU where the driver shows one and torch was built for it, else the CPU.

    Who has no GPU is not sent to `moedge doctor`: nothing is to be mended. `undriven` as for `check_torch`.
    """
    if driver is None:
        return Computing(None, f"no NVIDIA driver found{_MORE if undriven else ''}")
    if not gpus:
        return Computing(None, f"the NVIDIA driver shows no GPU to this process{_MORE}")
    if reason := unusable_torch(torch, driver):
        return Computing(None, f"{reason}{_MORE}")
    return Computing(gpus[0])


def computing_line(gpu_mem: str) -> str:
    """Which device computes on this machine with this much of its memory, and why not the GPU.

    Raises SettingError, BadSize.
    """
    computing = find_computing(wants_device(gpu_mem))
    if computing.gpu is None:
        without_device(gpu_mem)
        return computing.line()
    return computing.line(parse_size(gpu_mem, computing.gpu.nbytes, computing.gpu.nbytes, auto_device))


def _constants(source: str) -> dict[str, str | None]:
    """Names that a module gives text or None, without running it."""
    found: dict[str, str | None] = {}
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, str)):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


def _version_pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def dotted(pair: tuple[int, int]) -> str:
    """A version as it is written, "12.8"."""
    return ".".join(map(str, pair))


# Enough for the products of one pass, some tens, and of those before it: of 20,000 products of a job 284 were compiled
# with 128 of them, 227 with 256, 2,833 with 64. Compiling one takes 0.3 ms.
PRIMITIVES = 128
# torch's own cache, one per thread, of what oneDNN's cache has too: finding it there takes 15 us.
DESCRIPTORS = 16
_VARIABLES = {
    # Idle OpenMP threads sleep. By default they spin, even while another process needs their core: with both cores of a
    # small machine busy elsewhere, passes took 20 to 40 times as long (bench/results/log.md). Sleeping threads take
    # 0.1 ms to wake up; therefore small operations use one thread (quant/matmul/matmul.py).
    "OMP_WAIT_POLICY": "passive",
    # torch requests pages of 2 MiB for large buffers. Those of a large pass are mapped again each time and faulted in
    # page by page: that took half of the time of a norm over 4,096 tokens (bench/results/log.md).
    "THP_MEM_ALLOC_ENABLE": "1",
    # oneDNN compiles a product of bf16 matrices for every number of rows that it meets, and the rows of an expert are
    # other ones in every pass. A compiled product takes 0.27 MiB, and so does torch's description of it: with the
    # defaults, 1,024 of each, a job grew by up to 0.5 GiB (bench/results/log.md).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(PRIMITIVES),
    "LRU_CACHE_CAPACITY": str(DESCRIPTORS),
}
# Passes change shape, and a device's memory is capped: segments of fixed sizes fragment until the allocator
# returns all of them, which waits for the device, or fails.
ALLOCATOR = "expandable_segments:True"
# torch reads the first; releases before it had that name, the second.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settle() -> None:
    """Call this before torch is imported. Variables that the user set keep their values."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, ALLOCATOR))
