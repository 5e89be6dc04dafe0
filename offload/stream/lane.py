"""The words of movement: what moves (Shard), over what (Lane), and points in time to order it by (Mark).

A lane is where copies and compute meet: only lanes know reader threads or CUDA streams. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from .ring import Place


class StreamBroken(Exception):
    """Bytes stopped arriving; says which, and why. What was computed before stays valid."""


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
