"""Host memory of exact size in huge pages, and its page-locking as far as the machine allows.

Torch rounds pinned blocks up to powers of two; a slab takes what was planned and no byte more. Torch-free.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import torch

from .device import Device

PIN_CHUNK_NBYTES = 256 << 20
# The limit is found to this much: smaller pieces would cost a copy more per shard than they pin.
MIN_PIN_NBYTES = 16 << 20


class CudaRuntime(Protocol):
    """The part of `torch.cuda.cudart()` that pins; both return 0 for success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any: ...

    def cudaHostUnregister(self, address: int) -> Any: ...


def allocate(nbytes: int) -> mmap.mmap:
    """Anonymous memory, page-aligned; huge pages make direct reads into it 1.4 times as fast."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without huge pages; small ones hold the same bytes
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Pinned:
    """The page-locked beginning of a slab, in pieces registered one by one until the machine refuses.

    `clear_error` must swallow the CUDA error that a refusal leaves behind: it would be raised by the next kernel
    launched anywhere. Give `swallow_cuda_error`.
    """

    def __init__(self, runtime: CudaRuntime, address: int, nbytes: int, clear_error: Callable[[], None]) -> None:
        self._runtime = runtime
        self._address = address
        self._begins: list[int] = []
        self.nbytes = 0
        chunk_nbytes = PIN_CHUNK_NBYTES
        while self.nbytes < nbytes and chunk_nbytes >= MIN_PIN_NBYTES:
            size = min(chunk_nbytes, nbytes - self.nbytes)
            if int(runtime.cudaHostRegister(address + self.nbytes, size, 0)) == 0:
                self._begins.append(self.nbytes)
                self.nbytes += size
            else:
                clear_error()
                chunk_nbytes //= 2

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The run [begin, end) cut where registrations meet: one copy may not read from two of them, nor from a
        registered and an unregistered page (cuMemcpy: CUDA_ERROR_INVALID_VALUE)."""
        while begin < end:
            following = bisect_right(self._begins, begin)
            bound = self._begins[following] if following < len(self._begins) else max(self.nbytes, begin)
            last = min(end, bound) if bound > begin else end
            yield begin, last
            begin = last

    def close(self) -> None:
        """Unregisters every piece; an address reused while registered could never be pinned again."""
        while self._begins:
            self._runtime.cudaHostUnregister(self._address + self._begins.pop())
        self.nbytes = 0


class HostMemory:
    """`bytes` is uint8 [nbytes]."""

    def __init__(self, nbytes: int) -> None:
        self._memory = allocate(max(1, nbytes))
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[:nbytes]

    @property
    def nbytes(self) -> int:
        return self.bytes.numel()

    @property
    def view(self) -> memoryview:
        view: memoryview = self.bytes.numpy().data
        return view

    def pin(self, device: Device) -> Pinned:
        """Page-locks as much of the beginning as the machine allows; to be closed before the memory goes."""
        return Pinned(device.runtime, address_of(self._memory), self.nbytes, device.clear_error)
