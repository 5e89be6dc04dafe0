"""The GPU that computes: the part of its memory that this process may use, and the CUDA runtime.

Knows bytes and calls, not streams or contents. Nothing here is called on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import prepare_to_swallow, swallow_cuda_error
from .page_locked import PinBudget

# The most that a CUDA context takes before the first tensor; memory in use beyond it belongs to other processes.
CONTEXT_NBYTES = 640 << 20


class Device:
    """One GPU and the part of its memory that this process uses. `cuda` is `torch.cuda`, or a simulation of it.

    The constructor creates the CUDA context. Memory in use at that time beyond `CONTEXT_NBYTES` counts as memory of
    other processes, which is assumed to stay constant. `pins` counts the host memory that is page-locked for it.
    """

    def __init__(
        self, torch_device: torch.device, cuda: Any, clear_error: Callable[[], None] = swallow_cuda_error
    ) -> None:
        self.torch_device = torch_device
        self.cuda = cuda
        self.clear_error = clear_error
        self.pins = PinBudget()
        self.total: int = cuda.mem_get_info()[1]
        free: int = cuda.mem_get_info()[0]
        self._others: int = max(0, self.total - free - int(cuda.memory_reserved()) - CONTEXT_NBYTES)

    @property
    def runtime(self) -> Any:
        """The CUDA runtime, which pins host memory."""
        return self.cuda.cudart()

    @property
    def is_real(self) -> bool:
        """Whether CUDA runs it, and not a simulation."""
        return self.cuda is torch.cuda

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, such as (8, 6)."""
        properties = self.cuda.get_device_properties(self.torch_device)
        return properties.major, properties.minor

    @property
    def processors(self) -> int:
        """The number of streaming multiprocessors."""
        return int(self.cuda.get_device_properties(self.torch_device).multi_processor_count)

    @property
    def available(self) -> int:
        """The bytes that this process can use: all except those of other processes. Includes its own context."""
        return self.total - self._others

    @property
    def context_nbytes(self) -> int:
        """The bytes that this process uses outside torch's allocator now: the context, loaded kernels and libraries."""
        free, total = self.cuda.mem_get_info()
        return max(0, int(total - free - self.cuda.memory_reserved() - self._others))

    @property
    def peak(self) -> int:
        """The peak of what torch's allocator has reserved since `limit`, plus `context_nbytes`."""
        return int(self.cuda.max_memory_reserved()) + self.context_nbytes

    def synchronize(self) -> None:
        """Returns when the device has finished all submitted work."""
        self.cuda.synchronize()

    def give_back(self) -> None:
        """Frees the memory that torch's allocator caches."""
        self.cuda.empty_cache()

    def limit(self, nbytes: int) -> None:
        """Lets torch's allocator reserve at most `nbytes` from now on, and resets the peak."""
        self.give_back()
        self.cuda.reset_peak_memory_stats()
        self.cuda.set_per_process_memory_fraction(min(1.0, nbytes / self.total))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """An uninitialized uint8 tensor [nbytes] on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)


def find_device() -> Device | None:
    """The current CUDA device; None on a machine without one."""
    if not torch.cuda.is_available():
        return None
    prepare_to_swallow()
    return Device(torch.device("cuda", torch.cuda.current_device()), torch.cuda)
