"""Streams shards ahead of compute through one ring, in the order in which they are requested.

Knows the order and the free bytes of the ring. The caller decides which shards are needed and when; the lane decides
which thread or CUDA stream moves the bytes. Torch-free.

A lane orders copies against compute: only lanes know reader threads or CUDA streams. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..errors import ExitCode, MoedgeError

ALIGNMENT = 4096
# A run takes at most this part of a ring, so that the next ones go on while compute reads what one has brought.
RUNS_OF_A_RING = 3
# As many slots as a ring of 4 GB has for experts of a megabyte.
MOST_VIEWS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The range of `nbytes` from byte `offset` of the ring; the padding up to the alignment is reserved, too."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Ring:
    """Allocates slots from `capacity` bytes in ring order. An empty ring has a slot of any size up to `capacity`."""

    def __init__(self, capacity: int, alignment: int = ALIGNMENT) -> None:
        self.capacity = capacity
        self.alignment = alignment
        self._live: deque[tuple[Slot, int]] = deque()
        self._head = 0
        self._taken = 0

    def try_reserve(self, nbytes: int, shift: int = 0) -> Slot | None:
        """The next slot, or None until older slots are released. A slot never wraps: the rest at the end is skipped.

        It begins `shift` bytes after a multiple of the alignment.
        """
        size = self._padded(nbytes + shift)
        if not self._live:
            self._head = 0
        wraps = self._head + size > self.capacity
        skipped = self.capacity - self._head if wraps else 0
        if self._taken + skipped + size > self.capacity:
            return None
        if wraps:
            # The skipped rest becomes free together with the slot before it.
            youngest, taken = self._live.pop()
            self._live.append((youngest, taken + skipped))
        begin = 0 if wraps else self._head
        slot = Slot(begin + shift, nbytes)
        self._live.append((slot, size))
        self._taken += skipped + size
        self._head = begin + size
        return slot

    def release(self, slot: Slot) -> None:
        """Frees the oldest slot, and the bytes that were skipped after it. Raises ValueError for any other slot."""
        if not self._live or self._live[0][0] is not slot:
            raise ValueError(
                f"{slot} is not the oldest slot; slots are released in the order in which they were reserved"
            )
        self._taken -= self._live.popleft()[1]

    def _padded(self, nbytes: int) -> int:
        size = -(-nbytes // self.alignment) * self.alignment
        if not 0 < size <= self.capacity:
            raise ValueError(f"a shard has {nbytes} bytes, wanted 1 to {self.capacity}, the ring's capacity")
        return size


class StreamBroken(MoedgeError):
    """Shards stopped arriving; the message says which, and why. Results computed before stay valid."""

    exit_code = ExitCode.GAVE_OUT


class ShardPart(NamedTuple):
    """`nbytes` at `offset` of `file`, any offset; they are those from byte `begin` of a shard on."""

    file: Path | None
    offset: int
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One contiguous run of bytes: an expert, a layer's linears, the output head.

    `offset` counts from the start of `file`, or of the host slab if `file` is None. `crc32` is checked when a reader
    fetches the shard for the first time. A shard with `parts` is gathered from them instead; bytes between them stay as
    they are in the slot. A slot that begins `shift` bytes after a block receives them without a copy.
    """

    name: str
    nbytes: int
    offset: int
    file: Path | None = None
    crc32: int | None = None
    parts: tuple[ShardPart, ...] = ()
    shift: int = 0


DENSE = -1


class ShardKey(NamedTuple):
    """The name of a shard of a model: an expert of a layer, the layer's linears (`DENSE`), or the output `HEAD`."""

    layer: int
    expert: int = DENSE


HEAD = ShardKey(-1)


class SyncPoint(Protocol):
    """A point in an order of work, reached when all work before it is done; a CUDA event is one."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the point is reached."""


class Ready(Protocol):
    """The end of one copy; a CUDA event is one."""

    def query(self) -> bool:
        """Whether the bytes have arrived."""


ReadyT = TypeVar("ReadyT", bound=Ready)
# Shards and their slots, in the order of the ring.
Run = Sequence[tuple[Shard, Slot]]


class Lane(Protocol[ReadyT]):
    """Moves shards into slots asynchronously, and orders the copies against compute."""

    @property
    def most_together(self) -> int:
        """The longest run of shards that `start` brings together."""

    @property
    def nbytes_moved(self) -> int:
        """The bytes moved so far. A watchdog distinguishes slow from stuck by it."""

    @property
    def seconds_waited(self) -> float:
        """Seconds that compute waited for shards."""

    @property
    def seconds_busy(self) -> float:
        """Seconds during which there was something to move, so far."""

    def start(self, run: Run, after: SyncPoint | None) -> ReadyT:
        """Starts to move a run, whose shards arrive together, once `after` is reached (None: at once). Does not block.

        Shards of a run of several lie in the host's slab.
        """

    def wait(self, ready: ReadyT) -> None:
        """Makes all compute submitted from now on wait for `ready`."""

    def mark_used(self) -> SyncPoint | None:
        """The point after all compute submitted so far; None if it is reached already."""

    def close(self) -> None:
        """Returns when nothing moves any more; only then may the memory be freed."""


View_co = TypeVar("View_co", covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class Arrival(Generic[View_co]):
    """A shard that has arrived: compute may read `view` [shard.nbytes] until the arrival is released with `done`."""

    shard: Shard
    slot: Slot
    view: View_co


class ShardStream(Generic[View_co]):
    """Returns arrivals in the order of `ask`. Every call starts as many further copies as fit into the ring.

    Has one consumer thread. Several arrivals may be held at once; they are released in the order of their arrival.
    """

    def __init__(self, lane: Lane[Any], ring: Ring, memory: Any, shifts: bool = False) -> None:
        """`memory` are the ring's bytes: a memoryview, or a uint8 tensor. With `shifts`, slots begin where their shards
        can be read without a copy."""
        self._shifts = shifts
        self.lane = lane
        self.ring = ring
        self._memory = memory
        self._asked: deque[Shard] = deque()
        self._ahead: deque[tuple[Shard, Slot, Ready]] = deque()
        self._live: deque[Arrival[View_co]] = deque()
        self._views: dict[tuple[int, int], View_co] = {}
        self._used: SyncPoint | None = None
        # The end of the last copy that compute waits for.
        self._arrived: Ready | None = None
        self._closed = False
        self.num_arrived = 0
        self.nbytes_arrived = 0
        self.nbytes_from_files = 0

    def ask(self, *shards: Shard) -> None:
        """Requests shards, which arrive after all that were requested before."""
        self._asked.extend(shards)
        self._run_ahead()

    def recall(self) -> list[Shard]:
        """Cancels and returns the requests whose copies have not started, in their order; they are the latest ones."""
        recalled, self._asked = list(self._asked), deque()
        return recalled

    def drop(self) -> None:
        """Cancels all requests; copies that have started are waited for."""
        self.recall()
        while self._ahead:
            self.done(self.next())

    def next(self) -> Arrival[View_co]:
        """Waits for the oldest requested shard. Raises StreamBroken if it cannot arrive, ValueError without one."""
        self._run_ahead()
        if not self._ahead:
            raise ValueError(self._why_none_arrives())
        shard, slot, ready = self._ahead[0]
        if ready is not self._arrived:
            self.lane.wait(ready)
            self._arrived = ready
        self._ahead.popleft()
        arrival = Arrival(shard, slot, self._view(slot))
        self._live.append(arrival)
        self.num_arrived += 1
        self.nbytes_arrived += shard.nbytes
        self.nbytes_from_files += shard.nbytes if shard.file is not None else 0
        return arrival

    def done(self, *arrivals: Arrival[Any], used: SyncPoint | None = None) -> None:
        """Releases the oldest held arrivals; slots are overwritten after `used`, by default all compute so far."""
        # One sync point covers the slots before it: sync points and slots follow one order of work.
        mark = used or self.lane.mark_used()
        for arrival in arrivals:
            if not self._live or self._live[0] is not arrival:
                raise ValueError(f"{arrival.shard} is not the oldest arrival held; release arrivals in their order")
            self._live.popleft()
            self._used = mark
            self.ring.release(arrival.slot)
        self._run_ahead()

    def cycle(self, num_shards: int) -> Iterator[Arrival[View_co]]:
        """Yields the next arrivals; when the caller wants the next one, the last is released and requested again."""
        for _ in range(num_shards):
            arrival = self.next()
            yield arrival
            self.done(arrival)
            self.ask(arrival.shard)

    def is_ready(self) -> bool:
        """Whether `next` would return without waiting; compute may wait for its bytes already."""
        self._run_ahead()
        return bool(self._ahead) and (self._ahead[0][2] is self._arrived or self._ahead[0][2].query())

    def close(self) -> None:
        """Stops all copies; arrivals that are still held stay readable."""
        self._closed = True
        self.lane.close()

    def _run_ahead(self) -> None:
        if self._closed:
            raise StreamBroken("the stream is closed; nothing further arrives")
        run: list[tuple[Shard, Slot]] = []
        while self._asked and (slot := self._reserve(self._asked[0])):
            shard = self._asked.popleft()
            if run and not self._continues(run, shard, slot):
                self._start(run)
                run = []
            run.append((shard, slot))
        if run:
            self._start(run)

    def _continues(self, run: Run, shard: Shard, slot: Slot) -> bool:
        """Whether a shard may come together with those of `run`: in a few runs the ring takes turns."""
        (first, begin), most = run[0], self.ring.capacity // RUNS_OF_A_RING
        return (
            len(run) < self.lane.most_together
            and first.file is None
            and shard.file is None
            # Where the ring wraps, a run ends.
            and 0 < slot.end - begin.offset <= most
        )

    def _reserve(self, shard: Shard) -> Slot | None:
        return self.ring.try_reserve(shard.nbytes, shard.shift if self._shifts else 0)

    def _start(self, run: Run) -> None:
        try:
            ready: Ready = self.lane.start(run, self._used)
        except StreamBroken:
            # The slots reserved for it will never be filled, so nothing may arrive after it.
            self._closed = True
            raise
        self._ahead.extend((shard, slot, ready) for shard, slot in run)

    def _view(self, slot: Slot) -> View_co:
        """The bytes of a slot, which are kept: most slots come again, and asking for their bytes takes longer."""
        known = slot.offset, slot.nbytes
        if known not in self._views:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            self._views[known] = self._memory[slot.offset : slot.end]
        return self._views[known]

    def _why_none_arrives(self) -> str:
        if not self._asked:
            return "no shard was requested, so none arrives"
        held = sum(arrival.shard.nbytes for arrival in self._live)
        return (
            f"{self._asked[0]} does not fit into a ring of {self.ring.capacity} bytes while {held} are held; "
            "release arrivals before requesting more, or plan a larger ring"
        )
