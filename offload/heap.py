"""What malloc does with large buffers when they are freed: gives them back at once, or keeps them. Torch-free."""

from __future__ import annotations

import ctypes
from contextlib import suppress

from .memory import host_resident

# glibc's names (malloc.h) for the size from which an allocation is a mapping of its own, which goes back when it is
# freed, and for the free bytes at the heap's end from which they go back.
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
# What a process may grow by between two looks: tables, texts, and pages of the cache used for the first time.
MARGIN_NBYTES = 8 << 20
# What a heap that keeps buffers takes beside them; a job that has as much to spare may have one.
KEPT_NBYTES = 512 << 20


def return_memory() -> None:
    """Gives every large allocation a mapping of its own, which is returned when it is freed.

    glibc raises that size by itself, up to 32 MiB, after which a pass's buffers share one heap with small objects and
    leave holes: a job of 512 sequences grew by 5 MiB a pass, past its budget (docs/performance.md).
    """
    _set(_M_MMAP_THRESHOLD, 1 << 20)


def keep_memory() -> None:
    """Lets a pass reuse the memory of the pass before, for up to KEPT_NBYTES; have a `Heap` watched then.

    A mapping is zeroed page by page: a norm of 512 tokens takes 4.9 ms with `return_memory`, 1.2 with this
    (docs/performance.md).
    """
    _set(_M_MMAP_THRESHOLD, 32 << 20)
    _set(_M_TRIM_THRESHOLD, 256 << 20)


def _set(name: int, nbytes: int) -> None:
    # Another C library has no such function, and no such habit.
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(name, nbytes)


def trim() -> None:
    """Returns all free memory of the heap to the system."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """The free memory that glibc keeps for the next pass, watched so that it does not outgrow one pass's needs.

    Passes take and return buffers among small objects that stay, which leaves holes. All of them are returned when the
    process has grown, and kept otherwise.

    Made after the largest pass: what that left is what passes may keep.
    """

    def __init__(self) -> None:
        # Another C library has no such function, and no such habit.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        before = host_resident()
        self._spare = max(0, before - self._settled())
        self._limit = before + MARGIN_NBYTES
        self.num_trims = 0

    def after_pass(self) -> None:
        if self._trim is None or host_resident() <= self._limit:
            return
        self._limit = self._settled() + self._spare + MARGIN_NBYTES
        self.num_trims += 1

    def _settled(self) -> int:
        """Resident bytes once all free memory was returned."""
        if self._trim is not None:
            self._trim(0)
        return host_resident()
