"""The GPU that computes, and host memory of exact size that is page-locked for copies to it as the machine allows.

Host memory lies in huge pages. Torch rounds pinned blocks up to powers of two; a slab takes exactly the planned bytes.
Knows bytes and calls, not streams or contents. Nothing of a GPU is called on a machine without one; torch is imported
where it is called.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .errors import prepare_to_swallow, swallow_cuda_error

if TYPE_CHECKING:
    import torch

PIN_CHUNK_NBYTES = 256 << 20
# The limit is found to this precision: with smaller pieces, shards would need more copies for little pinned memory.
MIN_PIN_NBYTES = 16 << 20
# cudaErrorHostMemoryAlreadyRegistered.
ALREADY_REGISTERED = 712


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
    one `nbytes`): no two registrations share the bytes between two cuts. `budget` counts the locked bytes; `runtime` is
    `torch.cuda.cudart()`, or a simulation of it.
    `clear_error` must clear the CUDA error that a refusal leaves pending, which the next kernel launch would raise;
    pass `swallow_cuda_error`. Raises RuntimeError if part of the slab is registered already.
    """

    def __init__(
        self,
        runtime: Any,
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


class HostMemory:
    """A block of host memory; `bytes` is its tensor, uint8 [nbytes]."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self._memory = allocate(max(1, nbytes))
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[:nbytes]

    @property
    def nbytes(self) -> int:
        return self.bytes.numel()

    @property
    def view(self) -> memoryview:
        view: memoryview = self.bytes.numpy().data
        return view

    def pin(self, device: Device, cuts: Sequence[int] = ()) -> Pinned:
        """Page-locks as much of the beginning as the machine and the device's budget allow, in registrations that end
        at `cuts` (byte offsets). Close the result before this memory is freed."""
        address = address_of(self._memory)
        return Pinned(device.runtime, address, self.nbytes, device.clear_error, device.pins, cuts)


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
        import torch

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
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)


def find_device() -> Device | None:
    """The current CUDA device; None on a machine without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    prepare_to_swallow()
    return Device(torch.device("cuda", torch.cuda.current_device()), torch.cuda)
