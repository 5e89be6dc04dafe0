"""Places for runs of bytes in a ring: reserved in order, released in the same order.

Double buffering by bytes, not by layers: small shards run further ahead than large ones. Knows numbers, no memory
and no moment at which a place is safe to overwrite. Torch-free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

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
