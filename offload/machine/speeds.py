"""Measures how fast this machine reads its disk, its memory and its GPU's memory, and the link between them.

`measure_disk` reads a file that it writes for the purpose; `measure_cold_reads` reads existing files.

Every measurement returns None on a machine without a CUDA device.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import Any

from ..device import allocate
from ..errors import swallow_cuda_error
from .profile import Disk, DiskRead, Link, PinLimit

# A case takes a number of rows and returns a function that multiplies once; it returns when a device is done, too.
Case = Callable[[int], Callable[[], None]]


def measure_rates(
    cases: Mapping[str, Case], rows: Sequence[int], flop_per_row: int, seconds: float = 0.1
) -> dict[str, dict[int, float]]:
    """The FLOP/s of each case by number of rows; `flop_per_row` is 2 x inputs x outputs of the multiplied matrix."""
    return {
        name: {num: num * flop_per_row / best_seconds(case(num), seconds) for num in rows}
        for name, case in cases.items()
    }


def best_seconds(run: Callable[[], object], seconds: float = 0.1) -> float:
    """The time of the fastest run within `seconds`, after one warm-up run; slower runs were disturbed."""
    run()
    best = float("inf")
    deadline = time.perf_counter() + seconds
    while True:
        begun = time.perf_counter()
        run()
        ended = time.perf_counter()
        best = min(best, ended - begun)
        if ended > deadline:
            return best


def measure_memory(nbytes: int) -> float:
    """The rate in bytes/s of reading host memory with all threads: multiplies a matrix of `nbytes` by a vector.

    `nbytes` must be larger than the caches.
    """
    import torch

    columns = 4096
    matrix = torch.ones(nbytes // (4 * columns), columns)
    vector = torch.ones(columns)
    return 4 * matrix.numel() / best_seconds(lambda: torch.mv(matrix, vector), 0.5)


MIB = 1 << 20
BLOCKS = (1 * MIB, 4 * MIB, 8 * MIB)
THREADS = (1, 2, 4, 8)
ORDERS = (False, True)
_LEAST_NBYTES = 64 * MIB
_WRITE_SECONDS = 6.0


def measure_disk(
    folder: Path,
    nbytes: int = 1024 * MIB,
    seconds: float = 0.2,
    blocks: Sequence[int] = BLOCKS,
    threads: Sequence[int] = THREADS,
) -> Disk | None:
    """Reads twice for `seconds` with every block size (bytes) and number of threads, sequentially and at random.

    The file has `nbytes`, or fewer if that is more than a quarter of the free space or takes long to write. It has no
    name, so nothing of it remains even if the process is killed. Returns None if the disk has too little free space.
    """
    file_nbytes = min(nbytes, shutil.disk_usage(folder).free // 4) // max(blocks) * max(blocks)
    if file_nbytes < min(_LEAST_NBYTES, nbytes):
        return None
    with TemporaryFile(dir=folder, buffering=0) as file:
        begun = time.perf_counter()
        written = _fill(file.fileno(), file_nbytes, max(blocks))
        write_bytes_s = written / (time.perf_counter() - begun)
        descriptor, direct = open_cold(file.fileno())
        try:
            ways = list(itertools.product(blocks, threads, ORDERS))
            rates = dict.fromkeys(ways, 0.0)
            # All ways, then all in reverse: a slow start or other users of the disk do not affect only one way.
            for way in (*ways, *reversed(ways)):
                rates[way] = max(rates[way], _read_rate(descriptor, written, way, seconds))
        finally:
            os.close(descriptor)
    reads = (DiskRead(block, count, rate, at_random) for (block, count, at_random), rate in rates.items())
    return Disk(direct, written, tuple(reads), write_bytes_s=write_bytes_s)


def _fill(descriptor: int, nbytes: int, block: int) -> int:
    """Writes and flushes `nbytes`, or fewer if that takes too long; returns the number of bytes, in whole blocks."""
    # Windows of one random pool at odd offsets: hardly any two pages are equal, so the storage cannot deduplicate them.
    pool = memoryview(os.urandom(block + MIB))
    deadline = time.monotonic() + _WRITE_SECONDS
    written = 0
    while written < nbytes and (written < _LEAST_NBYTES or time.monotonic() < deadline):
        start = random.randrange(MIB) | 1
        written += os.pwrite(descriptor, pool[start : start + block], written)
        if written % _LEAST_NBYTES == 0:
            _drop_cached(descriptor)
    _drop_cached(descriptor)
    return written // block * block


def _drop_cached(descriptor: int) -> None:
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def open_cold(descriptor: int) -> tuple[int, bool]:
    """Opens the same file for reading; returns (descriptor, whether O_DIRECT is used, which some file systems lack)."""
    path = f"/proc/self/fd/{descriptor}"
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


def _read_rate(descriptor: int, nbytes: int, way: tuple[int, int, bool], seconds: float) -> float:
    """The total rate in bytes/s of threads that read blocks alternately in file order, or each at random."""
    block, threads, at_random = way
    _drop_cached(descriptor)
    with _buffers(threads * block) as buffers:
        begun = time.perf_counter()

        def read(start: int) -> int:
            offsets: Iterable[int] = range(start, sys.maxsize, threads * block)
            if at_random:
                # Readahead does not help.
                offsets = (random.randrange(nbytes // block) * block for _ in offsets)
            with buffers[start : start + block] as buffer:
                return _read(descriptor, nbytes, buffer, offsets, begun + seconds)

        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(read, range(0, threads * block, block)))
        return total / (time.perf_counter() - begun)


@contextmanager
def _buffers(nbytes: int) -> Iterator[memoryview]:
    """Memory like that into which weights are streamed: in huge pages, which direct reads fill up to twice as fast.

    Every page is touched first; otherwise the first read into each would include its page fault.
    """
    with allocate(nbytes) as memory, memoryview(memory) as buffers:
        buffers[:: mmap.PAGESIZE] = bytes(len(range(0, nbytes, mmap.PAGESIZE)))
        yield buffers


def _read(descriptor: int, nbytes: int, buffer: memoryview, offsets: Iterable[int], deadline: float) -> int:
    """Reads blocks until `deadline`, at least one; returns the bytes read. `offsets` are taken modulo the file size."""
    total = 0
    for offset in offsets:
        total += os.preadv(descriptor, [buffer], offset % nbytes)
        if time.perf_counter() >= deadline:
            break
    return total


# Fewer bytes would be read within SECONDS, or would fit a cache of the storage.
LEAST_NBYTES = 2 << 30
SMALLEST_FILE = 64 << 20
SECONDS = 1.5


def large_files(folder: Path, pattern: str = "*/*.safetensors") -> list[Path]:
    """The large files of `folder` whose path in it is as `pattern` says; none if they are too small in total."""
    return large(folder.glob(pattern))


def large(files: Iterable[Path]) -> list[Path]:
    """The large ones of `files`; none if they are too small in total."""
    found = [path for path in files if path.stat().st_size >= SMALLEST_FILE]
    return found if sum(path.stat().st_size for path in found) >= LEAST_NBYTES else []


def measure_cold_reads(files: list[Path], way: DiskRead, seconds: float = SECONDS) -> float | None:
    """The rate in bytes/s of reads with the block size and threads of `way`, of random blocks of `files`, each once.

    None if there are no files or they cannot be read.
    """
    try:
        with ExitStack() as opened:
            blocks = list(_blocks(files, way.block_nbytes, opened))
            random.shuffle(blocks)
            return _rate(blocks, way, seconds) if blocks else None
    except OSError:
        return None


def _blocks(files: list[Path], nbytes: int, opened: ExitStack) -> Iterator[tuple[int, int]]:
    """The (descriptor, offset) of every whole block."""
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
        with _buffers(way.block_nbytes) as buffer:
            while time.perf_counter() < begun + seconds:
                with lock:
                    block = next(left, None)
                if block is None:
                    break
                total += os.preadv(block[0], [buffer], block[1])
        return total

    with ThreadPoolExecutor(way.threads) as pool:
        total = sum(pool.map(read, range(way.threads)))
    return total / (time.perf_counter() - begun)


CHUNK_NBYTES = 256 << 20
FINEST_NBYTES = 16 << 20


def probe_pin_limit(
    register: Callable[[int, int], bool], unregister: Callable[[int], None], most_nbytes: int
) -> PinLimit:
    """Registers chunks of host memory until one is refused or `most_nbytes` are held, then unregisters all.

    `register(address, nbytes)` returns whether it succeeded. After a refusal the chunk size is halved, down to 16 MiB:
    the result is at most that much below the limit. The limit applies to all chunks together (WSL2), so all are held.
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


def measure_link(nbytes: int, device: str = "cuda") -> Link | None:
    """Times copies of `nbytes` from pageable and from pinned host memory to `device`; frees what it allocated."""
    import torch

    cuda = _cuda()
    if cuda is None:
        return None
    target, source = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.ones(nbytes, dtype=torch.uint8)
    pageable, pinned = nbytes / _copy_seconds(target, source), None
    # Registered after allocation: torch rounds blocks that it allocates as pinned to powers of two and keeps them.
    if _register(source.data_ptr(), nbytes):
        try:
            pinned = nbytes / _copy_seconds(target, source)
        finally:
            _unregister(source.data_ptr())
    del target
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    return Link(pageable, pinned)


def measure_device_memory(nbytes: int, device: str = "cuda") -> float | None:
    """The rate in bytes/s of copies within the device's memory; counts `nbytes` read and `nbytes` written."""
    import torch

    cuda = _cuda()
    if cuda is None:
        return None
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    rate = 2 * nbytes / _copy_seconds(torch.empty_like(source), source)
    del source
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    return rate


def measure_pin_limit(most_nbytes: int) -> PinLimit | None:
    """Probes how much host memory can be pinned, up to `most_nbytes`, which it allocates meanwhile."""
    return None if _cuda() is None else probe_pin_limit(_register, _unregister, most_nbytes)


def _copy_seconds(target: Any, source: Any) -> float:
    import torch

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return best_seconds(copy, 0.3)


def _register(address: int, nbytes: int) -> bool:
    if int(_cuda().cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    swallow_cuda_error()
    return False


def _unregister(address: int) -> None:
    _cuda().cudart().cudaHostUnregister(address)


def _cuda() -> Any:
    import torch

    return torch.cuda if torch.cuda.is_available() else None
