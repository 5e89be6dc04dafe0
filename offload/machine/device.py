"""The CUDA device of this process: its memory, the link to it, registering memory for it. None without one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .arithmetic import best_seconds
from .pinning import probe_pin_limit
from .profile import Link, PinLimit


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    total: int
    free: int


def device_memory() -> DeviceMemory | None:
    """Bytes of the current device, now; creates the context, which takes some of them."""
    cuda = _cuda()
    if cuda is None:
        return None
    free, total = cuda.mem_get_info()
    return DeviceMemory(total, free)


def device_overhead() -> int | None:
    """Bytes in use outside torch's allocator: the context, libraries, and, on a shared device, other processes."""
    memory, cuda = device_memory(), _cuda()
    if memory is None or cuda is None:
        return None
    return max(0, memory.total - memory.free - int(cuda.memory_reserved()))


def device_peak(overhead: int) -> int | None:
    """Most bytes that torch's allocator has reserved so far, and `overhead`, as measured when nothing else ran."""
    cuda = _cuda()
    return None if cuda is None else int(cuda.max_memory_reserved()) + overhead


def measure_link(nbytes: int, device: str = "cuda") -> Link | None:
    """bytes/s of copies of `nbytes` from pageable and from pinned host memory; what it took is given back."""
    import torch

    cuda = _cuda()
    if cuda is None:
        return None
    target, source = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.ones(nbytes, dtype=torch.uint8)
    pageable, pinned = nbytes / _copy_seconds(target, source), None
    # Registered, not allocated pinned: torch rounds such blocks up to powers of two and keeps them for ever.
    if _register(source.data_ptr(), nbytes):
        try:
            pinned = nbytes / _copy_seconds(target, source)
        finally:
            _unregister(source.data_ptr())
    del target
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    return Link(pageable, pinned)


def measure_pin_limit(most_nbytes: int) -> PinLimit | None:
    """Tries up to `most_nbytes` of host memory, which it takes for that time."""
    return None if _cuda() is None else probe_pin_limit(_register, _unregister, most_nbytes)


def _copy_seconds(target: Any, source: Any) -> float:
    import torch

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return best_seconds(copy, 0.3)


def _register(address: int, nbytes: int) -> bool:
    if int(_cuda().cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    _clear_refusal()
    return False


def _clear_refusal() -> None:
    """CUDA keeps an error until someone asks; the next kernel launch would, in someone's job, and fail there."""
    import torch

    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _unregister(address: int) -> None:
    _cuda().cudart().cudaHostUnregister(address)


def _cuda() -> Any:
    import torch

    return torch.cuda if torch.cuda.is_available() else None
