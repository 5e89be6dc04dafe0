"""Bytes that run ahead of compute: shards through one ring, in the order in which they are asked for.

Knows order and room. Which shards are wanted, and how early that is known, is the asker's business; which thread or
CUDA stream moves the bytes is the lane's. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from .lane import Lane, Mark, Place, Ready, Ring, Shard, StreamBroken

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
    """Arrivals in the order of `ask`. Every call starts as many further copies as the ring has room for.

    For one consumer thread. Several arrivals may be held at once; they go back in the order they came.
    """

    def __init__(self, lane: Lane[Any], ring: Ring, memory: Memory[View_co]) -> None:
        self._lane = lane
        self._ring = ring
        self._memory = memory
        self._asked: deque[Shard] = deque()
        self._ahead: deque[tuple[Shard, Place, Ready]] = deque()
        self._live: deque[Arrival[View_co]] = deque()
        self._used: Mark | None = None
        self._closed = False
        self.num_arrived = 0
        self.nbytes_arrived = 0
        self.nbytes_from_files = 0

    def ask(self, *shards: Shard) -> None:
        """They will arrive after all that was asked for before."""
        self._asked.extend(shards)
        self._run_ahead()

    def recall(self) -> list[Shard]:
        """Takes back what has not begun to move; returned in its order, as it was asked for last."""
        recalled, self._asked = list(self._asked), deque()
        return recalled

    def next(self) -> Arrival[View_co]:
        """Waits for the oldest shard that was asked for. Raises StreamBroken when it will not come."""
        self._run_ahead()
        if not self._ahead:
            raise ValueError(self._why_nothing_comes())
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

    def cycle(self, num_shards: int) -> Iterator[Arrival[View_co]]:
        """The next arrivals; each is given back, and its shard asked for again, when the one after it is wanted."""
        for _ in range(num_shards):
            arrival = self.next()
            yield arrival
            self.done(arrival)
            self.ask(arrival.shard)

    def is_ready(self) -> bool:
        """Whether `next` would hand out bytes that are already there."""
        self._run_ahead()
        return bool(self._ahead) and self._ahead[0][2].query()

    @property
    def capacity(self) -> int:
        """Bytes of the ring."""
        return self._ring.capacity

    @property
    def nbytes_moved(self) -> int:
        """Bytes that were copied, those that nobody asked for yet included."""
        return self._lane.nbytes_moved

    @property
    def seconds_busy(self) -> float:
        """How long something that was asked for had begun to move and was not there yet."""
        return self._lane.seconds_busy

    @property
    def seconds_waited(self) -> float:
        """How long compute stood still for want of bytes."""
        return self._lane.seconds_waited

    def close(self) -> None:
        """Ends all movement; arrivals still held stay readable."""
        self._closed = True
        self._lane.close()

    def _run_ahead(self) -> None:
        if self._closed:
            raise StreamBroken("the stream is closed; nothing further arrives")
        while self._asked and (place := self._ring.try_reserve(self._asked[0].nbytes)):
            shard = self._asked.popleft()
            self._ahead.append((shard, place, self._start(shard, place)))

    def _start(self, shard: Shard, place: Place) -> Ready:
        try:
            ready: Ready = self._lane.start(shard, place, self._used)
        except StreamBroken:
            # The place reserved for it will never be filled: nothing may come after it.
            self._closed = True
            raise
        return ready

    def _why_nothing_comes(self) -> str:
        if not self._asked:
            return "nothing was asked for, so nothing comes"
        held = sum(arrival.shard.nbytes for arrival in self._live)
        return (
            f"{self._asked[0]} finds no room in a ring of {self._ring.capacity} bytes while {held} are held; "
            "give arrivals back before asking for more, or plan a larger ring"
        )
