"""Measures the link to the CUDA device, the device's own memory, and how much host memory can be pinned.

Every measurement returns None on a machine without a CUDA device.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from ..errors import swallow_cuda_error
from .profile import Link, PinLimit
from .timing import best_seconds

CHUNK_NBYTES = 256 << 20
FINEST_NBYTES = 16 << 20


def probe_pin_limit(
    register: Callable[[int, int], bool], unregister: Callable[[int], None], most_nbytes: int
) -> PinLimit:
    """Registers chunks of host memory until one is refused or `most_nbytes` are held, then unregisters all.

    `register(address, nbytes)` returns whether it succeeded. After a refusal the chunk size is halved, down to 16 MiB:
    the result is at most that much below the limit. The limit applies to all chunks together (WSL2), so all are held.
    """
    held: list[tuple[int, mmap.mmap]] = []
    total, chunk, refused = 0, CHUNK_NBYTES, False
    try:
        while chunk >= FINEST_NBYTES and most_nbytes - total >= FINEST_NBYTES:
            nbytes = min(chunk, most_nbytes - total)
            memory = mmap.mmap(-1, nbytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if register(address, nbytes):
                held.append((address, memory))
                total += nbytes
            else:
                refused = True
                chunk = nbytes // 2
    finally:
        for address, _ in held:
            unregister(address)
    return PinLimit(total, refused)


def measure_link(nbytes: int, device: str = "cuda") -> Link | None:
    """Times copies of `nbytes` from pageable and from pinned host memory to `device`; frees what it allocated."""
    import torch

    cuda = _cuda()
    if cuda is None:
        return None
    target, source = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.ones(nbytes, dtype=torch.uint8)
    pageable, pinned = nbytes / _copy_seconds(target, source), None
    # Registered after allocation: torch rounds blocks that it allocates as pinned to powers of two and keeps them.
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
    """The rate in bytes/s of copies within the device's memory; counts `nbytes` read and `nbytes` written."""
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
    """Probes how much host memory can be pinned, up to `most_nbytes`, which it allocates meanwhile."""
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
