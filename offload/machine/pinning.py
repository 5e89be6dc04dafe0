"""How much host memory can be page-locked, found by trying. Knows registering as a function it is given. Torch-free."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

from .profile import PinLimit

CHUNK_NBYTES = 256 << 20
FINEST_NBYTES = 16 << 20


def probe_pin_limit(
    register: Callable[[int, int], bool], unregister: Callable[[int], None], most_nbytes: int
) -> PinLimit:
    """Registers chunks of host memory until one is refused or `most_nbytes` are held, and gives all back.

    `register(address, nbytes)` says whether it was granted. After a refusal chunks are halved, down to 16 MiB: what
    is found is at most that far below the limit. Limits count all chunks together (WSL2), hence all are held.
    """
    held: list[tuple[int, mmap.mmap]] = []
    total, chunk, refused = 0, CHUNK_NBYTES, False
    try:
        while chunk >= FINEST_NBYTES and most_nbytes - total >= FINEST_NBYTES:
            nbytes = min(chunk, most_nbytes - total)
            memory = mmap.mmap(-1, nbytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if register(address, nbytes):
                held.append((address, memory))
                total += nbytes
            else:
                refused = True
                chunk = nbytes // 2
    finally:
        for address, _ in held:
            unregister(address)
    return PinLimit(total, refused)
