"""What is settled for the whole process before torch is loaded: how threads wait, and how memory goes back."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

# glibc's name for the size from which an allocation is a mapping of its own (malloc.h).
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_NBYTES = 1 << 20
# Less than 0.1 ms: longer than from one operation to the next, shorter than what it saves.
_SPINS = "2000"


def wait_briefly() -> None:
    """Lets idle OpenMP threads spin for a moment, then sleep; what the user set in the environment stays.

    By default they spin on while another process has their core: with both cores of a small machine busy elsewhere,
    passes took 20 to 40 times as long. Asleep at once, they take a tenth of a millisecond to wake up, and a pass has a
    thousand small operations (docs/performance.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def return_memory() -> None:
    """Gives every large allocation a mapping of its own, which is returned when it is freed.

    glibc raises that size by itself, up to 32 MiB, after which a pass's buffers share one heap with small objects and
    leave holes: a job of 512 sequences grew by 5 MiB a pass, past its budget (docs/performance.md).
    """
    # Another C library has no such function, and no such habit.
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_NBYTES)
