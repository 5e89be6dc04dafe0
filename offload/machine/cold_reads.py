"""How fast large files are read that were there before: nothing of them lies in a cache of the disk, as of a file just
written, or in one of the host below a virtual machine, as of a file that was read a moment ago. Torch-free.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from mmap import mmap
from pathlib import Path
from threading import Lock

from .disk import open_cold
from .profile import DiskRead

# Less would be read within the time, or lie in such a cache.
LEAST_NBYTES = 2 << 30
SMALLEST_FILE = 64 << 20
SECONDS = 1.5


def large_files(folder: Path) -> list[Path]:
    """Files of weights in the folders of `folder`, those of stores; none where all together are too little."""
    found = [path for path in folder.glob("*/*.safetensors") if path.stat().st_size >= SMALLEST_FILE]
    return found if sum(path.stat().st_size for path in found) >= LEAST_NBYTES else []


def measure_cold_reads(files: list[Path], way: DiskRead, seconds: float = SECONDS) -> float | None:
    """bytes/s of reads that are made as `way` says, of blocks from anywhere in `files`, each of them once.

    None where there are no files, or they cannot be read.
    """
    try:
        with ExitStack() as opened:
            blocks = list(_blocks(files, way.block_nbytes, opened))
            random.shuffle(blocks)
            return _rate(blocks, way, seconds) if blocks else None
    except OSError:
        return None


def _blocks(files: list[Path], nbytes: int, opened: ExitStack) -> Iterator[tuple[int, int]]:
    """Descriptors and offsets of whole blocks."""
    for path in files:
        with path.open("rb") as file:
            descriptor, _ = open_cold(file.fileno())
        opened.callback(os.close, descriptor)
        yield from ((descriptor, start) for start in range(0, path.stat().st_size - nbytes + 1, nbytes))


def _rate(blocks: list[tuple[int, int]], way: DiskRead, seconds: float) -> float:
    lock, left = Lock(), iter(blocks)
    begun = time.perf_counter()

    def read(_: int) -> int:
        total = 0
        with mmap(-1, way.block_nbytes) as memory, memoryview(memory) as room:
            while time.perf_counter() < begun + seconds:
                with lock:
                    block = next(left, None)
                if block is None:
                    break
                total += os.preadv(block[0], [room], block[1])
        return total

    with ThreadPoolExecutor(way.threads) as pool:
        total = sum(pool.map(read, range(way.threads)))
    return total / (time.perf_counter() - begun)
