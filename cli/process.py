"""What is settled for the whole process before torch is loaded: how threads wait, and how memory goes back."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

# glibc's name for the size from which an allocation is a mapping of its own (malloc.h).
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_NBYTES = 1 << 20


def wait_without_spinning() -> None:
    """Lets idle OpenMP threads sleep; what the user set in the environment stays.

    They spin by default, and spin on while another process has their core: with both cores of a small machine busy
    elsewhere, passes took 20 to 40 times as long (docs/performance.md). Batch jobs share their machines. That sleepers
    take a tenth of a millisecond to wake up is why small operations get one thread (quant/linear.py).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def return_memory() -> None:
    """Gives every large allocation a mapping of its own, which is returned when it is freed.

    glibc raises that size by itself, up to 32 MiB, after which a pass's buffers share one heap with small objects and
    leave holes: a job of 512 sequences grew by 5 MiB a pass, past its budget (docs/performance.md).
    """
    # Another C library has no such function, and no such habit.
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_NBYTES)
