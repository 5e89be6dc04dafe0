"""Host memory of exact size in huge pages, and its page-locking as far as the machine allows.

Torch rounds pinned blocks up to powers of two; a slab takes what was planned and no byte more. Torch-free.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

PIN_CHUNK_NBYTES = 256 << 20
# The limit is found to this much: smaller pieces would cost a copy more per shard than they pin.
MIN_PIN_NBYTES = 16 << 20
# cudaErrorHostMemoryAlreadyRegistered.
ALREADY_REGISTERED = 712


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


class PinBudget:
    """How much host memory the process may page-lock, all uses together; `most` is None where no limit is known."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.taken = 0

    def allows(self, nbytes: int) -> bool:
        return self.most is None or self.taken + nbytes <= self.most


class Pinned:
    """The page-locked beginning of a slab, in pieces registered one by one until the machine refuses.

    Registrations end at `cuts` (ascending, multiples of the page size, the last one `nbytes`), as large as
    `PIN_CHUNK_NBYTES` allows: what lies between two cuts is never in two of them. `budget` counts what is locked.
    `clear_error` must swallow the CUDA error that a refusal leaves behind: it would be raised by the next kernel
    launched anywhere. Give `swallow_cuda_error`. Raises RuntimeError where something is registered there already.
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
        """A chunk, rounded down to the last cut in it; where none is, all up to the next one."""
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
        self._budget.taken -= self.nbytes
        self.nbytes = 0
