"""The card and the driver of a fake device: who has its memory, what is page-locked, what is still on its way."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from support.device import fake_allocator as allocators
from support.stream import simulator

MIB = 1 << 20
PAGE = 4096


class Machine(simulator.Machine):  # type: ignore[misc,name-defined]
    """The simulator's, for several threads: readers that wait for a copy let the machine run on."""

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        super().__init__(seed)
        self.actors.remove(self.compute)
        self.compute = Compute(self)

    def wander(self) -> None:
        with self.lock:
            super().wander()

    def advance(self) -> bool:
        # What the machine does is nobody's operation.
        with torch._C.DisableTorchFunction():
            return bool(super().advance())

    def run_until(self, reached: Callable[[], bool]) -> None:
        with self.lock:
            super().run_until(reached)


class Compute(simulator.Stream):  # type: ignore[misc,name-defined]
    """The stream that compute is on; its queue holds what is still to be looked at again."""

    def wait_event(self, event: Any) -> None:
        self.machine.wander()
        completion = event.latest
        if completion is not None:
            self.machine.run_until(lambda: completion.done)


class Event(simulator.Event):  # type: ignore[misc,name-defined]
    """Recorded on the current stream where none is named, as torch's."""

    def __init__(self, cuda: "Cuda") -> None:
        super().__init__(cuda.machine)
        self._cuda = cuda

    def record(self, stream: Any = None) -> None:
        super().record(stream or self._cuda.current_stream())


class Properties(NamedTuple):
    """Of a device, as torch names them."""

    major: int
    minor: int
    multi_processor_count: int = 4


class Use(NamedTuple):
    """What the driver takes when something is used for the first time, and what is said where it cannot."""

    nbytes: int
    refused: Callable[[], Exception]


def _accelerator_error() -> Exception:
    return torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")


FIRST_USES = {
    "cublas": Use(
        20 * MIB,
        lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ),
    "product": Use(8 * MIB, _accelerator_error),
    "attention": Use(6 * MIB, _accelerator_error),
    "triton": Use(1 * MIB, lambda: RuntimeError("Triton Error [CUDA]: out of memory")),
}
CUBLAS_WORKSPACE = 8 * MIB + 128 * 1024


class Cuda(simulator.Cuda):  # type: ignore[misc,name-defined]
    """What the code under test takes for `torch.cuda`.

    One card of `total` bytes, which the context, libraries and torch's allocator share; one budget of `pin_limit` bytes
    for everything that is page-locked. `larger` multiplies what first uses take.
    """

    def __init__(
        self,
        machine: Machine,
        total: int,
        context: int,
        pin_limit: float,
        properties: Properties,
        larger: int = 1,
    ) -> None:
        super().__init__(machine, pin_limit)
        self.total = total
        self.properties = properties
        self.outside: Counter[Any] = Counter(context=context)
        said = f"{os.environ.get('PYTORCH_ALLOC_CONF')},{os.environ.get('PYTORCH_CUDA_ALLOC_CONF')}"
        self.allocator = allocators.Allocator(self._left, "expandable_segments:True" in said, total)
        self.pinned_blocks: dict[int, int] = {}
        self._idle_pins: Counter[int] = Counter()
        self._larger = larger
        self._on_the_way: list[tuple[int, int, Any]] = []

    def cudart(self) -> "Cuda":
        return self

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Event:
        return Event(self)

    def Stream(self, device: Any = None) -> Any:
        return super().Stream()

    def set_stream(self, stream: Any) -> None:
        self._current = stream

    def synchronize(self, device: Any = None) -> None:
        self.machine.run_until(lambda: not any(actor.able() or actor.steps for actor in self.machine.actors))

    def get_device_properties(self, place: torch.device) -> Properties:
        return self.properties

    def mem_get_info(self) -> tuple[int, int]:
        return self._left(), self.total

    def memory_reserved(self) -> int:
        return int(self.allocator.reserved)

    def max_memory_reserved(self) -> int:
        return int(self.allocator.most_reserved)

    def empty_cache(self) -> None:
        self.allocator.release()

    def reset_peak_memory_stats(self) -> None:
        self.allocator.most_reserved = self.allocator.reserved
        self.allocator.most_allocated = self.allocator.allocated

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.allocator.limit = int(fraction * self.total)

    def take(self, nbytes: int) -> Any:
        return self.allocator.take(nbytes)

    def give(self, block: Any) -> None:
        self.allocator.give(block)

    def use(self, what: str, kind: object = None) -> None:
        """The driver loads what is used for the first time; torch's allocator is not asked and gives nothing back."""
        if (what, kind) in self.outside:
            return
        first = FIRST_USES[what]
        if first.nbytes * self._larger > self._left():
            raise first.refused()
        self.outside[what, kind] = first.nbytes * self._larger
        if what == "cublas":
            self.take(CUBLAS_WORKSPACE)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        first, last = address // PAGE * PAGE, -(-(address + nbytes) // PAGE) * PAGE
        code = 0
        if any(at // PAGE * PAGE < last and first < -(-(at + size) // PAGE) * PAGE for at, size in self._registrations):
            code = 712
        elif self.nbytes_pinned + nbytes > self.pin_limit:
            code = 2
        if code:
            self.stale_error = True
            return code
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.is_on_the_way(address, address + self.registered[address]):
            raise simulator.Race("host memory was unregistered while a copy was under way")
        del self.registered[address]
        return 0

    @property
    def nbytes_pinned(self) -> int:
        idle = sum(size * count for size, count in self._idle_pins.items())
        return sum(self.registered.values()) + sum(map(_power_of_two, self.pinned_blocks.values())) + idle

    def pin_block(self, address: int, nbytes: int) -> None:
        """A block of torch's page-locked memory: a power of two, kept for the next one of its size when it is freed."""
        size = _power_of_two(nbytes)
        if self._idle_pins[size]:
            self._idle_pins[size] -= 1
        elif self.nbytes_pinned + size > self.pin_limit:
            raise _accelerator_error()
        self.pinned_blocks[address] = nbytes

    def free_block(self, address: int) -> None:
        self._idle_pins[_power_of_two(self.pinned_blocks.pop(address))] += 1

    def is_pinned(self, begin: int, end: int) -> bool:
        """Whether one copy may read or write these bytes of the host at its leisure. Raises where it may not at all."""
        for at, nbytes in (*self._registrations, *self.pinned_blocks.items()):
            if at <= begin and end <= at + nbytes:
                return True
            if at < end and begin < at + nbytes:
                raise RuntimeError("CUDA error: invalid argument (one copy over the border of a registration)")
        return False

    def under_way(self, begin: int, end: int, stream: Any) -> None:
        """A copy from or to these bytes of the host is over when `stream` has come to here."""
        completion = simulator.Completion()
        stream.steps.append(lambda: setattr(completion, "done", True))
        self._on_the_way.append((begin, end, completion))

    def is_on_the_way(self, begin: int, end: int) -> bool:
        self._on_the_way = [each for each in self._on_the_way if not each[2].done]
        return any(at < end and begin < last for at, last, _ in self._on_the_way)

    @property
    def _registrations(self) -> list[tuple[int, int]]:
        return list(self.registered.items())

    def _left(self) -> int:
        return int(self.total - self.outside.total() - self.allocator.reserved)


def _power_of_two(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()
