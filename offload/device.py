"""The device that weights compute on: its memory as this process shares it, and the CUDA runtime behind it.

Knows bytes and calls, no streams and no contents. None of it is touched on a machine without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import prepare_to_swallow, swallow_cuda_error
from .page_locked import PinBudget

# Most that a context takes before the first tensor; what is in use beyond it belongs to other processes.
CONTEXT_NBYTES = 640 << 20


class Device:
    """One device and the share of it that is ours. `cuda` is `torch.cuda`, or a machine that replays its rules.

    Opening it makes the context. Other processes' memory is what is in use by then beyond `CONTEXT_NBYTES`; it is
    taken to stay as it is. `pins` counts the host memory that is page-locked for it.
    """

    def __init__(self, place: torch.device, cuda: Any, clear_error: Callable[[], None] = swallow_cuda_error) -> None:
        self.place = place
        self.cuda = cuda
        self.clear_error = clear_error
        self.pins = PinBudget()
        self.total: int = cuda.mem_get_info()[1]
        free: int = cuda.mem_get_info()[0]
        self._others: int = max(0, self.total - free - int(cuda.memory_reserved()) - CONTEXT_NBYTES)

    @property
    def runtime(self) -> Any:
        """What pins host memory."""
        return self.cuda.cudart()

    @property
    def capability(self) -> tuple[int, int]:
        """Of its arithmetic, as (8, 6)."""
        properties = self.cuda.get_device_properties(self.place)
        return properties.major, properties.minor

    @property
    def processors(self) -> int:
        """What runs blocks of threads side by side."""
        return int(self.cuda.get_device_properties(self.place).multi_processor_count)

    @property
    def available(self) -> int:
        """Bytes that this process could have: all that others do not, its own context included."""
        return self.total - self._others

    @property
    def context_nbytes(self) -> int:
        """Bytes of ours outside torch's allocator, now: the context, kernels and libraries loaded so far."""
        free, total = self.cuda.mem_get_info()
        return max(0, int(total - free - self.cuda.memory_reserved() - self._others))

    @property
    def peak(self) -> int:
        """Most bytes that torch's allocator has reserved since `limit`, and what lies outside it now."""
        return int(self.cuda.max_memory_reserved()) + self.context_nbytes

    def synchronize(self) -> None:
        """Returns when nothing that the device was asked for is still to be done."""
        self.cuda.synchronize()

    def give_back(self) -> None:
        """Frees what torch's allocator keeps for later."""
        self.cuda.empty_cache()

    def limit(self, nbytes: int) -> None:
        """From here on torch's allocator refuses to reserve more than `nbytes`; peaks are counted anew."""
        self.give_back()
        self.cuda.reset_peak_memory_stats()
        self.cuda.set_per_process_memory_fraction(min(1.0, nbytes / self.total))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of the device's memory, its contents unknown."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.place)


def find_device() -> Device | None:
    """The current CUDA device; None where there is none."""
    if not torch.cuda.is_available():
        return None
    prepare_to_swallow()
    return Device(torch.device("cuda", torch.cuda.current_device()), torch.cuda)
