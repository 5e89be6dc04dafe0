"""The types of streaming: what moves (Shard), where to (Ring, Slot), by what (Lane), in which order (SyncPoint).

A lane orders copies against compute: only lanes know reader threads or CUDA streams. Torch-free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ..errors import ExitCode, MoedgeError

ALIGNMENT = 4096


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
        ...


class Ready(Protocol):
    """The end of one copy; a CUDA event is one."""

    def query(self) -> bool:
        """Whether the bytes have arrived."""
        ...


ReadyT = TypeVar("ReadyT", bound=Ready)


class Lane(Protocol[ReadyT]):
    """Moves shards into slots asynchronously, and orders the copies against compute."""

    @property
    def nbytes_moved(self) -> int:
        """The bytes moved so far. A watchdog distinguishes slow from stuck by it."""
        ...

    @property
    def seconds_waited(self) -> float:
        """Seconds that compute waited for shards."""
        ...

    @property
    def seconds_busy(self) -> float:
        """Seconds during which there was something to move, so far."""
        ...

    def start(self, shard: Shard, slot: Slot, after: SyncPoint | None) -> ReadyT:
        """Starts the copy of `shard` into `slot`; it begins once `after` is reached (None: at once). Does not block."""
        ...

    def wait(self, ready: ReadyT) -> None:
        """Makes all compute submitted from now on wait for `ready`."""
        ...

    def mark_used(self) -> SyncPoint | None:
        """The point after all compute submitted so far; None if it is reached already."""
        ...

    def close(self) -> None:
        """Returns when nothing moves any more; only then may the memory be freed."""
        ...
