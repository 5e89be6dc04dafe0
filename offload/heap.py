"""Controls whether malloc returns freed large buffers to the system or keeps them. Torch-free."""

from __future__ import annotations

import ctypes
from contextlib import suppress

from .memory import host_resident

# glibc's parameters (malloc.h): from the first size on, an allocation is a mapping of its own, which is returned to the
# system when it is freed; from the second size on, free bytes at the end of the heap are returned.
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
# A process may grow by this much between two checks: tables, texts, and cache pages used for the first time.
MARGIN_NBYTES = 8 << 20
# The free memory that a heap which keeps buffers may hold; a job needs as much headroom to use `keep_memory`.
KEPT_NBYTES = 512 << 20


def return_memory() -> None:
    """Gives every large allocation a mapping of its own, which is returned to the system when it is freed.

    By default glibc raises the threshold up to 32 MiB. Then the buffers of a pass share one heap with small objects and
    fragment it: a job of 512 sequences grew by 5 MiB a pass and exceeded its budget (docs/performance.md).
    """
    _set(_M_MMAP_THRESHOLD, 1 << 20)


def keep_memory() -> None:
    """Lets a pass reuse the memory of the previous pass, up to KEPT_NBYTES. Use a `Heap` to bound the growth.

    A new mapping is zeroed page by page: a norm of 512 tokens takes 4.9 ms with `return_memory`, 1.2 ms with this
    (docs/performance.md).
    """
    _set(_M_MMAP_THRESHOLD, 32 << 20)
    _set(_M_TRIM_THRESHOLD, 256 << 20)


def _set(name: int, nbytes: int) -> None:
    # Other C libraries have neither this function nor this behaviour.
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(name, nbytes)


def trim() -> None:
    """Returns all free memory of the heap to the system."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Heap:
    """Bounds the free memory that glibc keeps for the next pass to what one pass needs.

    Passes allocate and free buffers between small objects that stay, which fragments the heap. When the process has
    grown, all free memory is returned to the system; otherwise it is kept. Create it after the largest pass: what that
    pass left free is what later passes may keep.
    """

    def __init__(self) -> None:
        # Other C libraries have neither this function nor this behaviour.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        before = host_resident()
        self._spare = max(0, before - self._settled())
        self._limit = before + MARGIN_NBYTES
        self.num_trims = 0

    def after_pass(self) -> None:
        """Returns all free memory to the system if the process has grown beyond its limit."""
        if self._trim is None or host_resident() <= self._limit:
            return
        self._limit = self._settled() + self._spare + MARGIN_NBYTES
        self.num_trims += 1

    def _settled(self) -> int:
        """Returns all free memory to the system; the resident bytes after that."""
        if self._trim is not None:
            self._trim(0)
        return host_resident()
