"""The schedule that keeps bytes running ahead of compute: a fixed cycle of shards through one ring, pass after pass.

Knows order and room; which thread or CUDA stream moves the bytes is the lane's business. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from .lane import Lane, Mark, Ready, Shard, StreamBroken
from .ring import Place, Ring

View_co = TypeVar("View_co", covariant=True)


class Memory(Protocol[View_co]):
    """The ring's bytes: a memoryview, or a uint8 tensor."""

    def __getitem__(self, run: slice, /) -> View_co: ...


@dataclass(frozen=True, slots=True, eq=False)
class Arrival(Generic[View_co]):
    """A shard that compute may read, through `view` [shard.nbytes], until it is given back with `done`."""

    shard: Shard
    place: Place
    view: View_co


class ShardStream(Generic[View_co]):
    """Arrivals in the order of `schedule`, for ever. Every call starts as many further copies as the ring has room for.

    For one consumer thread. Several arrivals may be held at once; they go back in the order they came.
    """

    def __init__(self, lane: Lane[Any], ring: Ring, memory: Memory[View_co], schedule: Sequence[Shard]) -> None:
        if not schedule:
            raise ValueError("the schedule is empty; a model that is held whole needs no stream")
        self._lane = lane
        self._ring = ring
        self._memory = memory
        self._schedule = schedule
        self._position = 0
        self._ahead: deque[tuple[Shard, Place, Ready]] = deque()
        self._live: deque[Arrival[View_co]] = deque()
        self._used: Mark | None = None
        self._closed = False
        self.num_arrived = 0
        self.nbytes_arrived = 0
        self.nbytes_from_files = 0

    def next(self) -> Arrival[View_co]:
        """Waits for the next shard of the schedule. Raises StreamBroken when it will not come."""
        self._run_ahead()
        if not self._ahead:
            held = sum(arrival.shard.nbytes for arrival in self._live)
            raise ValueError(
                f"{self._upcoming} finds no room in a ring of {self._ring.capacity} bytes while {held} are held; "
                "give arrivals back before asking for more, or plan a larger ring"
            )
        shard, place, ready = self._ahead[0]
        self._lane.wait(ready)
        self._ahead.popleft()
        arrival = Arrival(shard, place, self._memory[place.offset : place.end])
        self._live.append(arrival)
        self.num_arrived += 1
        self.nbytes_arrived += shard.nbytes
        self.nbytes_from_files += shard.nbytes if shard.file is not None else 0
        return arrival

    def done(self, arrival: Arrival[Any], used: Mark | None = None) -> None:
        """Gives back the oldest held arrival; its place is overwritten after `used`, by default all compute so far."""
        if not self._live or self._live[0] is not arrival:
            raise ValueError(f"{arrival.shard} is not the oldest arrival held; give arrivals back in their order")
        self._live.popleft()
        # One mark covers the places before it: marks lie on one order of work, and places are given back in order.
        self._used = used or self._lane.mark_used()
        self._ring.release(arrival.place)
        self._run_ahead()

    def take(self, num_shards: int) -> Iterator[Arrival[View_co]]:
        """The next `num_shards` arrivals; each is given back when the one after it, or the end, is asked for."""
        for _ in range(num_shards):
            arrival = self.next()
            yield arrival
            self.done(arrival)

    def is_ready(self) -> bool:
        """Whether `next` would hand out bytes that are already there."""
        self._run_ahead()
        return bool(self._ahead) and self._ahead[0][2].query()

    @property
    def nbytes_moved(self) -> int:
        """Bytes that were copied, those that nobody asked for yet included."""
        return self._lane.nbytes_moved

    @property
    def seconds_waited(self) -> float:
        """How long compute stood still for want of bytes."""
        return self._lane.seconds_waited

    def close(self) -> None:
        """Ends all movement; arrivals still held stay readable."""
        self._closed = True
        self._lane.close()

    @property
    def _upcoming(self) -> Shard:
        return self._schedule[self._position]

    def _run_ahead(self) -> None:
        if self._closed:
            raise StreamBroken("the stream is closed; nothing further arrives")
        while place := self._ring.try_reserve(self._upcoming.nbytes):
            self._ahead.append((self._upcoming, place, self._start(self._upcoming, place)))
            self._position = (self._position + 1) % len(self._schedule)

    def _start(self, shard: Shard, place: Place) -> Ready:
        try:
            ready: Ready = self._lane.start(shard, place, self._used)
        except StreamBroken:
            # The place reserved for it will never be filled: nothing may come after it.
            self._closed = True
            raise
        return ready
