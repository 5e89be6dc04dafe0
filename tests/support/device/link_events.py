"""Simulates passes whose weights, keys and values cross a link: copies and computing as events, in the product's order.

Streams, rings and the order of requests are the product's (`ShardStream`, `Ring`); what moves bytes is replaced. A copy
goes up a link that takes one at a time, once it was asked for and its slot is free; of several streams the one goes
first that could begin first. What lies on a disk is read into page-locked memory before, by the product's `StagedLane`;
the disk reads one thing at a time too. The host runs ahead of the device up to where the product waits: for the counts
of a layer's routed tokens, for new keys and values before the next pass, and for reads that a copy to the device
needs. `bench/throttled_link.py` compares it with passes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moedge.moe.streaming_order import MAX_TOGETHER
from moedge.offload.stream.cuda_lane import CudaLane, StagedLane
from moedge.offload.stream.stream import ALIGNMENT, Lane, Ring, Run, Shard, ShardStream, Slot
from moedge.runtime.kv.cohorts import STAGINGS

ON_DISK = Path("disk")


@dataclass(frozen=True)
class LayerWork:
    """Bytes of a layer that go up: its linears, 0 if they are held, `arriving` experts, and each cohort; those of new
    tokens go down. Seconds: of its linears, of attention, and of all experts. `read` of the experts lie on a disk, and
    the linears if `dense_read`."""

    dense_nbytes: int
    arriving: int
    expert_nbytes: int
    cohort_nbytes: int
    down_nbytes: int
    dense_s: float
    attention_s: float
    experts_s: float
    arriving_s: float
    read: int = 0
    dense_read: bool = False


@dataclass(frozen=True)
class Seconds:
    """What computing takes in a pass: `layers` of which are not `attention`, and `beside` them; and the thread that
    drives a device for a layer, for a cohort in one, for an expert that arrives, and beside layers.

    With `eager` that thread is the device, and takes nothing else.
    """

    layers: float
    attention: float
    beside: float
    layer: float = 0.0
    cohort: float = 0.0
    arrival: float = 0.0
    driven_beside: float = 0.0
    eager: bool = True


@dataclass(frozen=True)
class PassWork:
    """A pass: its layers, cohorts in host memory, rings in bytes, and seconds. `disk_bytes_s` and the rings that the
    disk fills are 0 where it has nothing."""

    layers: tuple[LayerWork, ...]
    cohorts: int
    dense_ring: int
    expert_ring: int
    window_ring: int
    seconds: Seconds
    disk_bytes_s: float = 0.0
    dense_staging: int = 0
    expert_staging: int = 0


@dataclass(eq=False)
class Copy:
    """A copy over a link, or a read of a disk, which may begin at `after`, and when what its slot had was copied on;
    `end` is known once the link has come to it."""

    link: Link
    machine: Machine
    nbytes: int
    after: float
    behind: Copy | None = None
    end: float | None = None

    def query(self) -> bool:
        self.link.advance_to(self.machine.host)
        return self.end is not None and self.end <= self.machine.host

    @property
    def begin(self) -> float | None:
        """When it could begin; None where that is not known yet."""
        if self.behind is None:
            return self.after
        return None if self.behind.end is None else max(self.after, self.behind.end)


@dataclass(eq=False)
class Point:
    """A time of the device."""

    at: float


class Link:
    """One copy at a time; of the streams' next ones, that which could begin first."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s, self.free, self.busy = bytes_s, 0.0, 0.0
        self.streams: list[deque[Copy]] = []

    def end_of(self, copy: Copy) -> float:
        while copy.end is None:
            for stream in self.streams:
                if stream and (behind := stream[0].behind):
                    behind.link.end_of(behind)
            self._advance()
        return copy.end

    def advance_to(self, now: float) -> None:
        """Begins all that can begin before `now`."""
        while any(max(self.free, begin) < now for begin, _ in self._heads()):
            self._advance()

    def _heads(self) -> list[tuple[float, deque[Copy]]]:
        heads = [(stream[0].begin, stream) for stream in self.streams if stream]
        return [(begin, stream) for begin, stream in heads if begin is not None]

    def _advance(self) -> None:
        begin, stream = min(self._heads(), key=lambda head: max(self.free, head[0]))
        first = stream.popleft()
        seconds = first.nbytes / self.bytes_s
        self.free = first.end = max(self.free, begin) + seconds
        self.busy += seconds


class Machine:
    """The clocks of the host and of the device, the link, and the disk."""

    def __init__(self, bytes_s: float, eager: bool, disk_bytes_s: float) -> None:
        self.host = self.device = 0.0
        self.eager, self.link, self.disk = eager, Link(bytes_s), Link(disk_bytes_s)

    def compute(self, seconds: float, host_s: float = 0.0) -> None:
        self.host += host_s
        self.device = max(self.device, self.host) + seconds
        self._tie()

    def wait_for(self, at: float) -> None:
        """The device waits."""
        self.device = max(self.device, at)
        self._tie()

    def synchronize(self, at: float | None = None) -> None:
        """The host waits, for all that was given to the device, or until `at`."""
        self.host = max(self.host, self.device if at is None else at)

    def _tie(self) -> None:
        if self.eager:
            self.host = self.device


class SimulatedLane:
    """A stream of the link (`Lane` of offload/stream/stream.py)."""

    most_together = CudaLane.most_together
    nbytes_moved, seconds_waited, seconds_busy = 0, 0.0, 0.0

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._copies: deque[Copy] = deque()
        machine.link.streams.append(self._copies)

    def start(self, run: Run, after: Point | None) -> Copy:
        return self._start(sum(slot.nbytes for _, slot in run), after)

    def pass_on(self, _: int, slot: Slot, after: Point | None) -> Copy:
        return self._start(slot.nbytes, after)

    def _start(self, nbytes: int, after: Point | None) -> Copy:
        begin = max(self._machine.host, after.at if after else 0.0)
        self._copies.append(copy := Copy(self._machine.link, self._machine, nbytes, begin))
        return copy

    def wait(self, ready: Copy) -> None:
        self._machine.wait_for(self._machine.link.end_of(ready))

    def mark_used(self) -> Point:
        return Point(self._machine.device)

    def close(self) -> None:
        pass


class SimulatedReader:
    """Reads of the disk, one after the other, for which the host waits (`Lane`)."""

    most_together = 1
    nbytes_moved, seconds_waited, seconds_busy = 0, 0.0, 0.0

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._reads: deque[Copy] = deque()
        machine.disk.streams.append(self._reads)

    def start(self, run: Run, after: Copy | None) -> Copy:
        ((_, slot),) = run
        read = Copy(self._machine.disk, self._machine, slot.nbytes, self._machine.host, after)
        self._reads.append(read)
        return read

    def wait(self, ready: Copy) -> None:
        self._machine.synchronize(self._machine.disk.end_of(ready))

    def mark_used(self) -> None:
        pass

    def close(self) -> None:
        pass


class Simulation:
    """Passes one after the other; `seconds` are of each, from the end of the one before."""

    def __init__(self, work: PassWork, bytes_s: float) -> None:
        self.work, self.machine = work, Machine(bytes_s, work.seconds.eager, work.disk_bytes_s)
        self._dense = self._stream(work.dense_ring, work.dense_staging)
        self._experts = self._stream(work.expert_ring, work.expert_staging)
        self._windows = self._stream(work.window_ring)
        self._written: deque[float] = deque()
        self._down_free = 0.0
        linears = self._shards([layer.dense_nbytes for layer in work.layers], [each.dense_read for each in work.layers])
        self._dense.ask(*linears)
        self._expert_shards = [self._experts_of(layer) for layer in work.layers]
        for shards in self._expert_shards:
            self._experts.ask(*shards)
        self.seconds: list[float] = []

    def run(self, passes: int) -> float:
        """Seconds of the last pass."""
        for _ in range(passes):
            begun = self.machine.device
            for index in range(len(self.work.layers)):
                self._layer(index)
            self.machine.compute(self.work.seconds.beside, self.work.seconds.driven_beside)
            self.machine.synchronize()
            self.seconds.append(self.machine.device - begun)
        return self.seconds[-1]

    def _layer(self, index: int) -> None:
        work, layer, machine = self.work, self.work.layers[index], self.machine
        dense = self._dense.next() if layer.dense_nbytes else None
        machine.compute(layer.dense_s / 2, work.seconds.layer)
        if index == 0 and work.cohorts:
            self._begin()
        parts = work.cohorts + 1
        machine.compute(layer.attention_s / parts)
        for _ in range(work.cohorts):
            window = self._windows.next()
            machine.compute(layer.attention_s / parts, work.seconds.cohort)
            self._windows.done(window)
        if work.cohorts:
            self._write(layer.down_nbytes)
        machine.compute(layer.dense_s / 2)
        if layer.experts_s:
            machine.synchronize()
            self._mix(index)
        if dense is not None:
            self._dense.done(dense)
            self._dense.ask(dense.shard)

    def _begin(self) -> None:
        while self._written:
            self.machine.synchronize(self._written.popleft())
        sizes = [layer.cohort_nbytes for layer in self.work.layers for _ in range(self.work.cohorts)]
        self._windows.ask(*self._shards(sizes))

    def _write(self, nbytes: int) -> None:
        """By the stream of compute."""
        if len(self._written) == STAGINGS:
            self.machine.synchronize(self._written.popleft())
        self.machine.compute(nbytes / self.machine.link.bytes_s)
        self._written.append(self.machine.device)

    def _mix(self, index: int) -> None:
        layer, left = self.work.layers[index], self.work.layers[index].arriving
        self.machine.compute(layer.experts_s - layer.arriving_s)
        each = layer.arriving_s / max(1, layer.arriving)
        # The same experts of the next pass are asked for as soon as the queue has room: it always has more than fit.
        self._experts.ask(*self._expert_shards[index])
        while left:
            together = [self._experts.next()]
            while len(together) < min(left, MAX_TOGETHER) and self._experts.is_ready():
                together.append(self._experts.next())
            self.machine.compute(each * len(together), self.work.seconds.arrival * len(together))
            self._experts.done(*together)
            left -= len(together)

    def _stream(self, nbytes: int, staging: int = 0) -> ShardStream[bytes]:
        lane = cast(Lane[Any], SimulatedLane(self.machine))
        if staging:
            host = ShardStream[bytes](cast(Lane[Any], SimulatedReader(self.machine)), Ring(staging), b"")
            # It is a stream of the link like a CUDA one.
            other = cast(Any, SimulatedLane(self.machine))
            lane = StagedLane(host, other, cast(Any, lane), lambda shard: shard.file is None)
        return ShardStream(lane, Ring(nbytes), b"")

    def _experts_of(self, layer: LayerWork) -> list[Shard]:
        """Those on the disk evenly among the others, as routers choose them."""
        read = [
            (at + 1) * layer.read // layer.arriving > at * layer.read // layer.arriving for at in range(layer.arriving)
        ]
        return self._shards([layer.expert_nbytes] * layer.arriving, read)

    def _shards(self, sizes: list[int], read: list[bool] | None = None) -> list[Shard]:
        shards, begin = [], 0
        for index, nbytes in enumerate(sizes):
            if nbytes:
                shards.append(Shard("", nbytes, begin, ON_DISK if read and read[index] else None))
                begin += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return shards
