"""The link to the CUDA device of this process, and registering memory for it. None without one."""

from __future__ import annotations

from typing import Any

from ..cuda_error import swallow_cuda_error
from .arithmetic import best_seconds
from .pinning import probe_pin_limit
from .profile import Link, PinLimit


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


def measure_device_memory(nbytes: int, device: str = "cuda") -> float | None:
    """bytes/s that the device moves in its own memory: `nbytes` read and as many written."""
    import torch

    cuda = _cuda()
    if cuda is None:
        return None
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    rate = 2 * nbytes / _copy_seconds(torch.empty_like(source), source)
    del source
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    return rate


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
    swallow_cuda_error()
    return False


def _unregister(address: int) -> None:
    _cuda().cudart().cudaHostUnregister(address)


def _cuda() -> Any:
    import torch

    return torch.cuda if torch.cuda.is_available() else None
