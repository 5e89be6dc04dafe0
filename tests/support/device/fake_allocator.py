"""Torch's caching allocator as it takes memory from a card: segments, rounding, fragmentation and a hard cap.

Small blocks (up to 1 MiB) come out of segments of 2 MiB, others out of segments of 20 MiB or of their own size. With
expandable segments each pool is one, which grows by 2 or 20 MiB and gives such pieces back.
"""

from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch

MIB = 1 << 20
ROUNDING = 512
SMALL = MIB
LARGE = 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB


class Block(NamedTuple):
    """Bytes [begin, end) of a pool's addresses."""

    pool: "Pool"
    begin: int
    end: int


class Pool:
    """`free` are runs of addresses that nobody has, ascending; segments never touch one another."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.granule = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int]] = []
        self.frontier = 0
        self.reserved = 0

    def take(self, size: int) -> Block | None:
        """The smallest free run that has room, split where the rest is worth it."""
        while fitting := [run for run in self.free if run[1] - run[0] >= size]:
            begin, end = run = min(fitting, key=lambda run: run[1] - run[0])
            # Meanwhile a tensor may have been collected, whose block has become part of this run.
            with suppress(ValueError):
                self.free.remove(run)
                break
        else:
            return None
        rest = end - begin - size
        if rest >= self.least_rest():
            insort(self.free, (begin + size, end))
            end = begin + size
        return Block(self, begin, end)

    def give(self, begin: int, end: int) -> None:
        near = [run for run in self.free if run[1] == begin or run[0] == end]
        for run in near:
            self.free.remove(run)
        insort(self.free, (min(begin, *(run[0] for run in near), begin), max(end, *(run[1] for run in near), end)))

    def least_rest(self) -> int:
        raise NotImplementedError

    def wanted(self, size: int) -> int:
        """Bytes that have to be reserved for a block of `size`."""
        raise NotImplementedError

    def grow(self, nbytes: int) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Gives back what is reserved and wholly free."""
        raise NotImplementedError


class Segments(Pool):
    """Segments of fixed sizes: what is free in two of them serves no block."""

    def __init__(self, small: bool) -> None:
        super().__init__(small)
        self.sizes: dict[int, int] = {}

    def least_rest(self) -> int:
        return ROUNDING if self.small else SMALL + 1

    def wanted(self, size: int) -> int:
        return self.granule if self.small or size < LARGE else _rounded(size, SMALL_SEGMENT)

    def grow(self, nbytes: int) -> None:
        begin = self.frontier + ROUNDING
        self.sizes[begin] = nbytes
        self.frontier = begin + nbytes
        self.reserved += nbytes
        insort(self.free, (begin, self.frontier))

    def release(self) -> None:
        for begin, end in list(self.free):
            if self.sizes.get(begin) == end - begin:
                self.free.remove((begin, end))
                self.reserved -= self.sizes.pop(begin)


class Expandable(Pool):
    """One segment, mapped granule by granule."""

    def least_rest(self) -> int:
        return ROUNDING

    def wanted(self, size: int) -> int:
        begin, end = self.free[-1] if self.free else (0, 0)
        at_hand = end - begin if end == self.frontier else 0
        return _rounded(size - at_hand, self.granule)

    def grow(self, nbytes: int) -> None:
        self.give(self.frontier, self.frontier + nbytes)
        self.frontier += nbytes
        self.reserved += nbytes

    def release(self) -> None:
        for begin, end in list(self.free):
            first, last = _rounded(begin, self.granule), end // self.granule * self.granule
            if last <= first:
                continue
            self.free.remove((begin, end))
            for run in ((begin, first), (last, end)):
                if run[0] < run[1]:
                    insort(self.free, run)
            self.reserved -= last - first


class Allocator:
    """`left()` is what the card has left; `limit` is the most that may be reserved."""

    def __init__(self, left: Callable[[], int], expandable: bool, limit: int) -> None:
        kind = Expandable if expandable else Segments
        self._pools = [kind(small=False), kind(small=True)]
        self._left = left
        self.limit = limit
        self.allocated = self.most_allocated = self.most_reserved = 0

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self._pools)

    def take(self, nbytes: int) -> Block:
        """Raises OutOfMemoryError."""
        size = _rounded(max(1, nbytes), ROUNDING)
        pool = self._pools[size <= SMALL]
        block = pool.take(size)
        if block is None:
            self._grow(pool, size)
            block = pool.take(size)
            assert block is not None
        self.allocated += block.end - block.begin
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def give(self, block: Block) -> None:
        self.allocated -= block.end - block.begin
        block.pool.give(block.begin, block.end)

    def release(self) -> None:
        for pool in self._pools:
            pool.release()

    def _grow(self, pool: Pool, size: int) -> None:
        if not self._has_room(pool.wanted(size)):
            self.release()
        wanted = pool.wanted(size)
        if not self._has_room(wanted):
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {wanted} bytes; {self.reserved} of {self.limit} are reserved, "
                f"{self.allocated} in use, {self._left()} left on the card"
            )
        pool.grow(wanted)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _has_room(self, nbytes: int) -> bool:
        return self.reserved + nbytes <= self.limit and nbytes <= self._left()


def _rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
