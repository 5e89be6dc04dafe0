"""The words of movement: what moves (Shard), over what (Lane), and points in time to order it by (Mark).

A lane is where copies and compute meet: only lanes know reader threads or CUDA streams. Torch-free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ..errors import ExitCode, MoedgeError

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """`nbytes` bytes from `offset`; the ring keeps the rest up to the next aligned byte free for it too."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Ring:
    """`capacity` bytes. Any place of at most that size fits once all others are released."""

    def __init__(self, capacity: int, alignment: int = ALIGNMENT) -> None:
        self.capacity = capacity
        self.alignment = alignment
        self._live: deque[tuple[Place, int]] = deque()
        self._head = 0
        self._taken = 0

    def try_reserve(self, nbytes: int) -> Place | None:
        """The next place, None while older ones are in its way. A place never wraps: the end's rest is skipped."""
        size = self._padded(nbytes)
        if not self._live:
            self._head = 0
        wraps = self._head + size > self.capacity
        skipped = self.capacity - self._head if wraps else 0
        if self._taken + skipped + size > self.capacity:
            return None
        if wraps:
            # The skipped rest becomes free together with the place that it follows.
            youngest, taken = self._live.pop()
            self._live.append((youngest, taken + skipped))
        place = Place(0 if wraps else self._head, nbytes)
        self._live.append((place, size))
        self._taken += skipped + size
        self._head = place.offset + size
        return place

    def release(self, place: Place) -> None:
        """Frees the oldest place, and what was skipped behind it."""
        if not self._live or self._live[0][0] is not place:
            raise ValueError(f"{place} is not the oldest place; places are released in the order they were taken")
        self._taken -= self._live.popleft()[1]

    def _padded(self, nbytes: int) -> int:
        size = -(-nbytes // self.alignment) * self.alignment
        if not 0 < size <= self.capacity:
            raise ValueError(f"a shard of {nbytes} bytes, wanted 1 to {self.capacity}, the ring's capacity")
        return size


class StreamBroken(MoedgeError):
    """Bytes stopped arriving; says which, and why. What was computed before stays valid."""

    exit_code = ExitCode.GAVE_OUT


@dataclass(frozen=True, slots=True)
class Shard:
    """One contiguous run of bytes: an expert, a layer's linears, the output head.

    `offset` counts from the start of `file`, or of the host slab where `file` is None. `crc32` is checked the
    first time a reader fetches the shard.
    """

    name: str
    nbytes: int
    offset: int
    file: Path | None = None
    crc32: int | None = None


DENSE = -1


class ShardKey(NamedTuple):
    """The name of a shard of a model: an expert of a layer, the layer's linears (`DENSE`), or the output `HEAD`."""

    layer: int
    expert: int = DENSE


HEAD = ShardKey(-1)


class Mark(Protocol):
    """A point in an order of work, reached when all work before it is done; a CUDA event is one."""

    def synchronize(self) -> None:
        """Blocks the calling thread until it is reached."""
        ...


class Ready(Protocol):
    """The end of one copy; a CUDA event is one."""

    def query(self) -> bool:
        """Whether the bytes are there."""
        ...


ReadyT = TypeVar("ReadyT", bound=Ready)


class Lane(Protocol[ReadyT]):
    """Moves shards into places, asynchronously, and orders the copies against compute."""

    @property
    def nbytes_moved(self) -> int:
        """Grows while bytes move; a watchdog tells slow from stuck by it."""
        ...

    @property
    def seconds_waited(self) -> float:
        """How long compute stood still for want of bytes."""
        ...

    @property
    def seconds_busy(self) -> float:
        """How long there was something to move, so far."""
        ...

    def start(self, shard: Shard, place: Place, after: Mark | None) -> ReadyT:
        """Copies `shard` into `place` once `after` is reached, at once where it is None. Does not block."""
        ...

    def wait(self, ready: ReadyT) -> None:
        """All compute asked for from here on comes after `ready`."""
        ...

    def mark_used(self) -> Mark | None:
        """The point after all compute asked for so far; None where it is reached already."""
        ...

    def close(self) -> None:
        """Returns when nothing moves any more; only then may the memory go."""
        ...
