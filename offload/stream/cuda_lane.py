"""Copies into a ring on the device: from pinned host memory, or over three tiers from disk through it.

The only file that uses a CUDA stream. `cuda` is `torch.cuda`, or a simulation of it. Torch-free.

Of three tiers, shards that are pinned in host memory skip the first stage. `StagedLane` has no thread of its own: every
call passes on what has arrived from the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..device import Pinned
from .stream import ALIGNMENT, Run, Shard, ShardStream, Slot, SyncPoint

if TYPE_CHECKING:
    import torch


class Event(SyncPoint, Protocol):
    """A point in a CUDA stream. Use a new object each time: a wait on an event that is not recorded does not wait."""

    def query(self) -> bool: ...

    def record(self, stream: Any) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to `end`."""


class CudaLane:
    """A Lane from `host`, a slab's tensor of which `pinned` is page-locked, into `memory`, the ring's on the device.

    Unpinned bytes are copied too, but the copy blocks the calling thread: send them through a StagedLane instead.
    """

    # A wait, two events and their later questions for each run, however long it is (bench/host_cost.py).
    most_together = 16

    def __init__(self, cuda: Any, host: torch.Tensor, pinned: Pinned, memory: torch.Tensor) -> None:
        self._cuda = cuda
        self._host = host
        self._pinned = pinned
        self._memory = memory
        self._side = cuda.Stream()
        # The allocator may have given the ring memory that compute submitted earlier still has to read.
        self._side.wait_event(self._recorded(cuda.current_stream()))
        self._waits: deque[tuple[Event, Event]] = deque()
        self._copies: deque[tuple[Event, Event]] = deque()
        self._seconds_waited = 0.0
        self._seconds_busy = 0.0
        self.nbytes_moved = 0

    def start(self, run: Run, after: SyncPoint | None) -> Event:
        self.nbytes_moved += sum(slot.nbytes for _, slot in run)
        return self.copy(joined(run), after)

    def pass_on(self, begin: int, slot: Slot, after: SyncPoint | None) -> Event:
        """As `start`, for bytes that lie elsewhere than their shard: from byte `begin` of the host memory on."""
        self.nbytes_moved += slot.nbytes
        return self.copy([(begin, slot)], after)

    def copy(self, pieces: Iterable[tuple[int, Slot]], after: SyncPoint | None) -> Event:
        """Fills slots from bytes of the host memory, each from the one where its piece begins, once `after` is
        reached."""
        if after is not None:
            self._side.wait_event(after)
        begin_copy = self._recorded(self._side, enable_timing=True)
        with self._cuda.stream(self._side):
            for begin, slot in pieces:
                self.move(begin, slot)
        ready = self._recorded(self._side, enable_timing=True)
        self._copies.append((begin_copy, ready))
        return ready

    def move(self, begin: int, slot: Slot) -> None:
        """Copies a piece on the current stream."""
        for first, last in self._pinned.pieces(begin, begin + slot.nbytes):
            target = self._memory[slot.offset + first - begin : slot.offset + last - begin]
            # Bytes that are not page-locked are copied synchronously, or they could be overwritten meanwhile.
            target.copy_(self._host[first:last], non_blocking=last <= self._pinned.nbytes)

    def wait(self, ready: Event) -> None:
        compute = self._cuda.current_stream()
        begin = self._recorded(compute, enable_timing=True)
        compute.wait_event(ready)
        self._waits.append((begin, self._recorded(compute, enable_timing=True)))
        # Finished spans are summed now, so that the number of events stays small over many passes.
        self._seconds_waited += _finished(self._waits)
        self._seconds_busy += _finished(self._copies)

    def mark_used(self) -> Event:
        return self._recorded(self._cuda.current_stream())

    def close(self) -> None:
        """Waits for all copies, which read the host's memory, and for compute, which reads the ring's."""
        self._side.synchronize()
        self._cuda.current_stream().synchronize()

    @property
    def seconds_waited(self) -> float:
        """Seconds that the device waited for copies, up to the work that it has finished."""
        self._seconds_waited += _finished(self._waits)
        return self._seconds_waited

    @property
    def seconds_busy(self) -> float:
        """Seconds that the link was copying, up to the work that it has finished."""
        self._seconds_busy += _finished(self._copies)
        return self._seconds_busy

    def _recorded(self, stream: Any, enable_timing: bool = False) -> Event:
        event: Event = self._cuda.Event(enable_timing=enable_timing)
        event.record(stream)
        return event


def joined(run: Run) -> Iterator[tuple[int, Slot]]:
    """Where each piece begins, and its slot: neighbours that find neighbouring slots are one. What lies between two
    of them is nobody's, and crosses the link too."""
    begin, whole = run[0][0].offset, run[0][1]
    for shard, slot in run[1:]:
        apart = shard.offset - begin
        # Behind the last one, with nothing but padding between them; a slot where the ring wraps is no neighbour.
        if apart == slot.offset - whole.offset and 0 <= slot.offset - whole.end < ALIGNMENT:
            whole = Slot(whole.offset, slot.end - whole.offset)
            continue
        yield begin, whole
        begin, whole = shard.offset, slot
    yield begin, whole


def _finished(spans: deque[tuple[Event, Event]]) -> float:
    """Removes the spans that are over; returns their total seconds."""
    seconds = 0.0
    while spans and spans[0][1].query():
        begin, end = spans.popleft()
        seconds += begin.elapsed_time(end) / 1000
    return seconds


@dataclass(slots=True, eq=False)
class Relay:
    """One shard on its way through both stages; `copied` is None until its bytes have arrived in host memory."""

    shard: Shard
    slot: Slot
    after: SyncPoint | None
    copied: Event | None = None

    def query(self) -> bool:
        return self.copied is not None and self.copied.query()


class StagedLane:
    """A Lane that copies shards for which `is_direct` is true with `direct`, and all others when they have left `host`.

    A shard is requested from `host` when its slot on the device is known. `staging` copies from the memory that `host`
    fills; it and `direct` copy into the same ring.
    """

    most_together = 1

    def __init__(
        self, host: ShardStream[Any], staging: CudaLane, direct: CudaLane, is_direct: Callable[[Shard], bool]
    ) -> None:
        self._host = host
        self._staging = staging
        self._direct = direct
        self._is_direct = is_direct
        self._waiting: deque[Relay] = deque()

    @property
    def nbytes_moved(self) -> int:
        return self._host.lane.nbytes_moved + self._staging.nbytes_moved + self._direct.nbytes_moved

    @property
    def seconds_waited(self) -> float:
        return self._direct.seconds_waited + self._host.lane.seconds_waited

    @property
    def seconds_busy(self) -> float:
        # The stages work at the same time: the slower one is the bottleneck.
        return max(self._host.lane.seconds_busy, self._staging.seconds_busy + self._direct.seconds_busy)

    def start(self, run: Run, after: SyncPoint | None) -> Relay:
        ((shard, slot),) = run
        relay = Relay(shard, slot, after)
        if self._is_direct(shard):
            relay.copied = self._direct.start(run, after)
        else:
            self._waiting.append(relay)
            self._host.ask(shard)
            self._pass_on_ready()
        return relay

    def wait(self, ready: Relay) -> None:
        # A wait on an event that is not recorded yet does not wait: the copy must be started first.
        while ready.copied is None:
            self._pass_on()
        self._direct.wait(ready.copied)
        self._pass_on_ready()

    def mark_used(self) -> Event:
        self._pass_on_ready()
        return self._direct.mark_used()

    def close(self) -> None:
        self._host.close()
        self._staging.close()
        self._direct.close()

    def _pass_on_ready(self) -> None:
        while self._waiting and self._host.is_ready():
            self._pass_on()

    def _pass_on(self) -> None:
        arrival = self._host.next()
        relay = self._waiting.popleft()
        if arrival.shard != relay.shard:
            raise ValueError(f"the host stream returned {arrival.shard}, wanted {relay.shard}; it has another consumer")
        relay.copied = self._staging.pass_on(arrival.slot.offset, relay.slot, relay.after)
        # The reader may overwrite the host's bytes once the copy from them is done, long before compute is.
        self._host.done(arrival, used=relay.copied)
