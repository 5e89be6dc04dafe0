"""Allocates host memory of exact size in huge pages, and page-locks as much of it as the machine allows.

Torch rounds pinned blocks up to powers of two; a slab takes exactly the planned bytes. Torch-free.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

PIN_CHUNK_NBYTES = 256 << 20
# The limit is found to this precision: with smaller pieces, shards would need more copies for little pinned memory.
MIN_PIN_NBYTES = 16 << 20
# cudaErrorHostMemoryAlreadyRegistered.
ALREADY_REGISTERED = 712


class CudaRuntime(Protocol):
    """The part of `torch.cuda.cudart()` that pins memory; both functions return 0 on success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any: ...

    def cudaHostUnregister(self, address: int) -> Any: ...


def allocate(nbytes: int) -> mmap.mmap:
    """Allocates anonymous, page-aligned memory; huge pages make direct reads into it 1.4 times as fast."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # The kernel may lack huge pages; normal pages work too.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def address_of(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class PinBudget:
    """How many bytes of host memory the process may page-lock in total; `most` is None if no limit is known."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.taken = 0

    def allows(self, nbytes: int) -> bool:
        return self.most is None or self.taken + nbytes <= self.most


class Pinned:
    """The page-locked beginning of a slab, in pieces that are registered one by one until the machine refuses.

    Registrations are up to `PIN_CHUNK_NBYTES` long and end at `cuts` (ascending, multiples of the page size, the last
    one `nbytes`): no two registrations share the bytes between two cuts. `budget` counts the locked bytes.
    `clear_error` must clear the CUDA error that a refusal leaves pending, which the next kernel launch would raise;
    pass `swallow_cuda_error`. Raises RuntimeError if part of the slab is registered already.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        address: int,
        nbytes: int,
        clear_error: Callable[[], None],
        budget: PinBudget | None = None,
        cuts: Sequence[int] = (),
    ) -> None:
        self._runtime = runtime
        self._address = address
        self._clear_error = clear_error
        self._budget = budget or PinBudget()
        self._begins: list[int] = []
        self.nbytes = 0
        chunk_nbytes, refused = PIN_CHUNK_NBYTES, nbytes + 1
        while self.nbytes < nbytes and chunk_nbytes >= MIN_PIN_NBYTES:
            size = self._next_size(nbytes, chunk_nbytes, cuts)
            if size < refused and self._register(size):
                continue
            chunk_nbytes, refused = chunk_nbytes // 2, min(refused, size)

    def _next_size(self, nbytes: int, chunk_nbytes: int, cuts: Sequence[int]) -> int:
        """The bytes of a chunk up to the last cut in it, or up to the next cut if no cut is in it."""
        if not cuts:
            return min(chunk_nbytes, nbytes - self.nbytes)
        following = bisect_right(cuts, self.nbytes + chunk_nbytes)
        inside = following and cuts[following - 1] > self.nbytes
        return cuts[following - 1 if inside else following] - self.nbytes

    def _register(self, size: int) -> bool:
        if not self._budget.allows(size):
            return False
        code = int(self._runtime.cudaHostRegister(self._address + self.nbytes, size, 0))
        if code != 0:
            self._clear_error()
            if code == ALREADY_REGISTERED:
                self.close()
                raise RuntimeError(
                    f"{size:,} bytes to be page-locked are registered with CUDA already: memory was freed before "
                    "it was unregistered; start the process again"
                )
            return False
        self._begins.append(self.nbytes)
        self.nbytes += size
        self._budget.taken += size
        return True

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Splits the bytes [begin, end) at the bounds of registrations: one copy may not read from two of them, nor
        from registered and unregistered pages (cuMemcpy: CUDA_ERROR_INVALID_VALUE)."""
        while begin < end:
            following = bisect_right(self._begins, begin)
            bound = self._begins[following] if following < len(self._begins) else max(self.nbytes, begin)
            last = min(end, bound) if bound > begin else end
            yield begin, last
            begin = last

    def close(self) -> None:
        """Unregisters every piece. An address that is reused while it is registered could never be pinned again."""
        while self._begins:
            self._runtime.cudaHostUnregister(self._address + self._begins.pop())
        self._budget.taken -= self.nbytes
        self.nbytes = 0
