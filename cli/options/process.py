"""What is settled for the whole process before torch is loaded: how threads wait, and what pages memory comes in."""

from __future__ import annotations

import os


def settle() -> None:
    """To be called before torch is imported; what the user set in the environment stays."""
    wait_without_spinning()
    use_large_pages()


def wait_without_spinning() -> None:
    """Lets idle OpenMP threads sleep.

    They spin by default, and spin on while another process has their core: with both cores of a small machine busy
    elsewhere, passes took 20 to 40 times as long (docs/performance.md). Batch jobs share their machines. That sleepers
    take a tenth of a millisecond to wake up is why small operations get one thread (quant/matmul/parallel.py).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def use_large_pages() -> None:
    """Asks torch to ask Linux for pages of 2 MiB, where a buffer has as much.

    Buffers of a large pass are mapped anew each time and faulted in page by page: of a norm over 4,096 tokens that was
    half of the time (docs/performance.md).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
