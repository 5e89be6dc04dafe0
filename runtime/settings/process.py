"""What is settled for the whole process before torch is loaded: how threads wait, what pages memory comes in, and how
torch's allocator takes a device's memory."""

from __future__ import annotations

import os

# Passes change shape, and a device's memory is capped: of segments of fixed sizes more and more lies idle, until the
# allocator gives all of it back, which waits for the device, or refuses.
ALLOCATOR = "expandable_segments:True"
# torch reads the first; releases before it had that name, the second.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settle() -> None:
    """To be called before torch is imported; what the user set in the environment stays."""
    wait_without_spinning()
    use_large_pages()
    let_segments_grow()


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


def let_segments_grow() -> None:
    """Asks torch for segments of device memory that grow. Where the user set either variable, that alone counts."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, ALLOCATOR))
