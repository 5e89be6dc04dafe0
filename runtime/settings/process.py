"""Settings of the whole process that must precede the import of torch: how threads wait, the size of memory pages, how
many compiled products oneDNN keeps, and how torch's allocator takes GPU memory."""

from __future__ import annotations

import os

# Passes change shape, and a device's memory is capped: segments of fixed sizes fragment until the allocator
# returns all of them, which waits for the device, or fails.
ALLOCATOR = "expandable_segments:True"
# torch reads the first; releases before it had that name, the second.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settle() -> None:
    """Call this before torch is imported. Variables that the user set keep their values."""
    wait_without_spinning()
    use_large_pages()
    keep_few_products()
    let_segments_grow()


def wait_without_spinning() -> None:
    """Lets idle OpenMP threads sleep.

    By default they spin, even while another process needs their core: with both cores of a small machine busy
    elsewhere, passes took 20 to 40 times as long (bench/results/log.md). Batch jobs share their machines. Sleeping
    threads take 0.1 ms to wake up; therefore small operations use one thread (quant/matmul/matmul.py).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def use_large_pages() -> None:
    """Makes torch request pages of 2 MiB from Linux for large buffers.

    Buffers of a large pass are mapped again each time and faulted in page by page: that took half of the time of a norm
    over 4,096 tokens (bench/results/log.md).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


# Enough for the products of one pass, some tens, and of those before it: of 20,000 products of a job 284 were compiled
# with 128 of them, 227 with 256, 2,833 with 64. Compiling one takes 0.3 ms.
PRIMITIVES = 128
# torch's own cache, one per thread, of what oneDNN's cache has too: finding it there takes 15 us.
DESCRIPTORS = 16


def keep_few_products() -> None:
    """Limits how many compiled products oneDNN keeps, and how many descriptions of them torch keeps beside it.

    oneDNN compiles a product of bf16 matrices for every number of rows that it meets, and the rows of an expert are
    other ones in every pass. A compiled product takes 0.27 MiB, and so does its description: with the defaults, 1,024
    of each, a job grew by up to 0.5 GiB (bench/results/log.md).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(DESCRIPTORS))


def let_segments_grow() -> None:
    """Makes torch use growing segments of GPU memory, unless the user set either variable."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, ALLOCATOR))
