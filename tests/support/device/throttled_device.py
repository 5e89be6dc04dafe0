"""A device whose memory is the host's and whose link is slow: copies take their time, and nothing is checked.

Compute is the processor's, so that what it is given is done when the call returns; the stream of compute is the calling
thread. Copies by other streams are those of a thread, the copy engine: it takes them in the order in which they were
submitted, each once its stream has come to it, sleeps for bytes / rate and copies. Time is counted from when a copy
could begin, so that waking up late delays one copy and not those behind it. What compute copies into page-locked memory
takes as long, on an engine of its own, and compute waits, as on a CUDA stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moedge.offload.device import Device

AMPLE = 1 << 40


class Event:
    """Reached at `at`, seconds of `perf_counter`; None before. Of no stream it is reached when it is recorded."""

    def __init__(self, cuda: ThrottledCuda) -> None:
        self._cuda = cuda
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._cuda.current_stream()
        if stream is self._cuda.compute:
            self.at = time.perf_counter()
        else:
            stream.submit(self)

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        self._cuda.wait_until(self.query)

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return 1000 * (end.at - self.at)


Copy = tuple[torch.Tensor, torch.Tensor]


class Stream:
    """A queue of copies, events that are waited for, and events that are recorded; `now` is how far it has come."""

    def __init__(self, cuda: ThrottledCuda) -> None:
        self._cuda = cuda
        self.now = 0.0
        self.steps: deque[tuple[int, float, Copy | Event | None, Event | None]] = deque()

    def submit(self, step: Copy | Event | None, after: Event | None = None) -> None:
        with self._cuda.changed:
            self.steps.append((next(self._cuda.order), time.perf_counter(), step, after))
            self._cuda.changed.notify_all()

    def wait_event(self, event: Event) -> None:
        if self is self._cuda.compute:
            event.synchronize()
        else:
            self.submit(None, event)

    def synchronize(self) -> None:
        self._cuda.wait_until(lambda: not self.steps)

    def come_to_copy(self) -> bool:
        """Takes what takes no time; returns whether a copy is next."""
        while self.steps:
            _, submitted, step, after = self.steps[0]
            if after is not None and after.at is None:
                return False
            self.now = max(self.now, submitted, after.at if after and after.at else 0.0)
            if isinstance(step, tuple):
                return True
            if step is not None:
                step.at = self.now
            self.steps.popleft()
        return False


class ThrottledCuda:
    """In place of `torch.cuda`. `busy_s` are the seconds of copies up, `nbytes` what they brought."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s
        self.changed = threading.Condition()
        self.order = count()
        self.compute = Stream(self)
        self._current = self.compute
        self._streams: list[Stream] = []
        self._registered: dict[int, int] = {}
        self._closed = False
        self.start_counting()
        threading.Thread(target=self._copy_engine, daemon=True).start()

    def start_counting(self) -> None:
        self.busy_s, self.nbytes = 0.0, 0

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self)

    def Stream(self) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    def current_stream(self) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def synchronize(self) -> None:
        self.wait_until(lambda: not any(stream.steps for stream in self._streams))

    def mem_get_info(self) -> tuple[int, int]:
        return AMPLE, AMPLE

    def memory_reserved(self) -> int:
        return 0

    max_memory_reserved = memory_reserved

    def empty_cache(self) -> None:
        pass

    def cudart(self) -> ThrottledCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        del self._registered[address]

    def is_registered(self, address: int) -> bool:
        return any(begin <= address < begin + nbytes for begin, nbytes in self._registered.items())

    def wait_until(self, reached: Any) -> None:
        with self.changed:
            self.changed.wait_for(reached)

    def sleep_down(self, nbytes: int) -> None:
        """A copy of compute's to the host."""
        time.sleep(nbytes / self.bytes_s)

    def _copy_engine(self) -> None:
        now = 0.0
        while True:
            with self.changed:
                while not (able := [stream for stream in self._streams if stream.come_to_copy()]):
                    self.changed.notify_all()
                    if self._closed:
                        return
                    self.changed.wait()
                self.changed.notify_all()
            stream = min(able, key=lambda each: each.steps[0][0])
            target, source = stream.steps[0][2]  # type: ignore[misc]
            seconds = source.numel() / self.bytes_s
            now = max(now, stream.now) + seconds
            time.sleep(max(0.0, now - time.perf_counter()))
            with torch.inference_mode():
                target.copy_(source)
            with self.changed:
                stream.now = now
                stream.steps.popleft()
                self.busy_s += seconds
                self.nbytes += source.numel()


class ThrottledDevice(TorchFunctionMode):
    """Inside `with ThrottledDevice(bytes_s) as throttled`, copies to and from `throttled.device` take as long as a link
    of `bytes_s` in each direction. One thread computes: those of a CPU's products would copy without it."""

    def __init__(self, bytes_s: float) -> None:
        super().__init__()
        assert torch.get_num_threads() == 1
        self.cuda = ThrottledCuda(bytes_s)
        self.device = _Memory(self.cuda)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        if self.cuda.current_stream() is not self.cuda.compute:
            self.cuda.current_stream().submit((target, source))
            return target
        result = func(*args, **(kwargs or {}))
        if self.device.has(source) and self.cuda.is_registered(target.data_ptr()):
            self.cuda.sleep_down(target.numel() * target.element_size())
        return result


class _Memory(Device):
    """The device: memory of the host that it knows again."""

    def __init__(self, cuda: ThrottledCuda) -> None:
        super().__init__(torch.device("cpu"), cuda, lambda: None)
        self._storages: set[int] = set()

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = super().allocate(nbytes)
        self._storages.add(memory.untyped_storage().data_ptr())
        return memory

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages
