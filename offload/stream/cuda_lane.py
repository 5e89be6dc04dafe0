"""Copies from host memory into a ring on the device, by a side stream, ordered against compute by events.

The only file that names a CUDA stream. `cuda` is `torch.cuda`, or a machine that replays its rules. Torch-free.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..page_locked import Pinned
from .lane import Mark, Place, Shard


class Event(Mark, Protocol):
    """A point in a stream. One object per use: a wait on an event that was never recorded waits for nothing."""

    def query(self) -> bool: ...

    def record(self, stream: Any) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`."""
        ...


class Stream(Protocol):
    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class Cuda(Protocol):
    """The part of `torch.cuda` that copies need."""

    def Stream(self) -> Any: ...

    def Event(self, enable_timing: bool = False) -> Any: ...

    def current_stream(self) -> Any: ...

    def stream(self, stream: Any, /) -> AbstractContextManager[Any]: ...


class Bytes(Protocol):
    """A uint8 tensor: slices of it are copied with `copy_`."""

    def __getitem__(self, run: slice, /) -> Any: ...


class CudaLane:
    """A Lane from `host` (a slab as a tensor, pinned as `pinned` says) into `memory` (the ring's tensor on the device).

    Unpinned bytes are copied too, but then the calling thread stands still: route them through a StagedLane.
    """

    def __init__(self, cuda: Cuda, host: Bytes, pinned: Pinned, memory: Bytes) -> None:
        self._cuda = cuda
        self._host = host
        self._pinned = pinned
        self._memory = memory
        self._side: Stream = cuda.Stream()
        # The allocator may have cut the ring out of memory that compute asked for earlier has still to read.
        self._side.wait_event(self._recorded(cuda.current_stream()))
        self._waits: deque[tuple[Event, Event]] = deque()
        self._copies: deque[tuple[Event, Event]] = deque()
        self._seconds_waited = 0.0
        self._seconds_busy = 0.0
        self.nbytes_moved = 0

    def start(self, shard: Shard, place: Place, after: Mark | None) -> Event:
        return self.copy(shard.offset, place, after)

    def copy(self, begin: int, place: Place, after: Mark | None) -> Event:
        """Copies `place.nbytes` bytes from byte `begin` of the host memory."""
        if after is not None:
            self._side.wait_event(after)
        begin_copy = self._recorded(self._side, enable_timing=True)
        with self._cuda.stream(self._side):
            for first, last in self._pinned.pieces(begin, begin + place.nbytes):
                target = self._memory[place.offset + first - begin : place.offset + last - begin]
                # What is not page-locked is read while the calling thread waits, or it could be overwritten meanwhile.
                target.copy_(self._host[first:last], non_blocking=last <= self._pinned.nbytes)
        self.nbytes_moved += place.nbytes
        ready = self._recorded(self._side, enable_timing=True)
        self._copies.append((begin_copy, ready))
        return ready

    def wait(self, ready: Event) -> None:
        compute = self._cuda.current_stream()
        begin = self._recorded(compute, enable_timing=True)
        compute.wait_event(ready)
        self._waits.append((begin, self._recorded(compute, enable_timing=True)))
        # Finished ones are added up now: events are few, passes many.
        self._seconds_waited += _finished(self._waits)
        self._seconds_busy += _finished(self._copies)

    def mark_used(self) -> Event:
        return self._recorded(self._cuda.current_stream())

    def close(self) -> None:
        """Copies read the host's memory and compute reads the ring's: both must be over before either may go."""
        self._side.synchronize()
        self._cuda.current_stream().synchronize()

    @property
    def seconds_waited(self) -> float:
        """How long the device stood still, as far as it has come."""
        self._seconds_waited += _finished(self._waits)
        return self._seconds_waited

    @property
    def seconds_busy(self) -> float:
        """How long the link moved bytes, as far as it has come."""
        self._seconds_busy += _finished(self._copies)
        return self._seconds_busy

    def _recorded(self, stream: Any, enable_timing: bool = False) -> Event:
        event: Event = self._cuda.Event(enable_timing=enable_timing)
        event.record(stream)
        return event


def _finished(spans: deque[tuple[Event, Event]]) -> float:
    """Takes out the spans that are over; returns how long they were together."""
    seconds = 0.0
    while spans and spans[0][1].query():
        begin, end = spans.popleft()
        seconds += begin.elapsed_time(end) / 1000
    return seconds
