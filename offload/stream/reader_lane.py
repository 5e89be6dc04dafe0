"""Reader threads that fetch shards into host memory, from files or from host memory that cannot be pinned.

Shards are read in chunks, so that all threads work on the shard that is needed first. Torch-free.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from ..device import address_of, allocate
from .stream import ALIGNMENT, Run, Shard, ShardPart, StreamBroken, SyncPoint


class Source(Protocol):
    """Bytes that reader threads can read: a file or host memory."""

    def read(self, target: memoryview, offset: int, nbytes: int) -> None:
        """Reads `nbytes` from `offset` into `target`; may overwrite the rest of `target`. Raises OSError."""

    def close(self) -> None: ...


class DirectFile:
    """A file that is read with O_DIRECT, or through the page cache (then dropped) if the file system refuses that.

    The descriptor stays open: a file that is renamed or removed meanwhile can still be read. A file that is modified,
    truncated or extended is noticed after the read that it affected. Offsets and targets are multiples of ALIGNMENT.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor, self.direct = _open(path)
        self._opened = self._state()

    def read(self, target: memoryview, offset: int, nbytes: int) -> None:
        self.fetch(target, offset, nbytes)
        self.check()

    def fetch(self, target: memoryview, offset: int, nbytes: int) -> None:
        """Does what `read` does, without a look at the file: call `check` behind several."""
        if self.direct:
            self._read_direct(target, offset, nbytes)
        else:
            self._read_cached(target, offset, nbytes)

    def check(self) -> None:
        """Raises OSError if the file changed after it was opened."""
        if self._state() != self._opened:
            raise OSError(errno.ESTALE, "the file changed after it was opened")

    def close(self) -> None:
        os.close(self._descriptor)

    def _state(self) -> tuple[int, int, int]:
        status = os.fstat(self._descriptor)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read_direct(self, target: memoryview, offset: int, nbytes: int) -> None:
        """Reads whole aligned blocks; the last one extends beyond `nbytes`, or to the end of the file."""
        padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        position = 0
        while position < nbytes:
            read = os.preadv(self._descriptor, [target[position:padded]], offset + position)
            if position + read >= nbytes:
                return
            # After a short read, continue from the last whole block: the kernel refuses to start inside one.
            advance = read - read % ALIGNMENT
            if not advance:
                raise _ended(offset + position + read)
            position += advance

    def _read_cached(self, target: memoryview, offset: int, nbytes: int) -> None:
        position = 0
        while position < nbytes:
            read = os.preadv(self._descriptor, [target[position:nbytes]], offset + position)
            if not read:
                raise _ended(offset + position)
            position += read
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


# A huge page: reads into it are faster than into small ones.
BUFFER_NBYTES = 2 << 20


class ThreadBuffer:
    """A buffer of BUFFER_NBYTES for each thread, in huge pages where there are any."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def bytes(self) -> memoryview:
        """This thread's buffer."""
        buffer: memoryview | None = getattr(self._local, "bytes", None)
        if buffer is None:
            memory = allocate(2 * BUFFER_NBYTES)
            # A huge page begins at a multiple of its size.
            begin = -address_of(memory) % BUFFER_NBYTES
            buffer = self._local.bytes = memoryview(memory)[begin : begin + BUFFER_NBYTES]
        return buffer


class UnalignedFile(DirectFile):
    """A DirectFile whose offsets and targets are any, and which leaves the rest of a target as it is.

    Direct reads put whole blocks where they belong if the target lies in its pages as the bytes do in the file's
    blocks; others, and the ends, go through a buffer, which files can share.
    """

    def __init__(self, path: Path, buffer: ThreadBuffer) -> None:
        super().__init__(path)
        self._buffer = buffer

    def _read_direct(self, target: memoryview, offset: int, nbytes: int) -> None:
        if nbytes + 2 * ALIGNMENT > BUFFER_NBYTES:
            raise ValueError(f"{nbytes} bytes were wanted, at most {BUFFER_NBYTES - 2 * ALIGNMENT} are read at a time")
        if not self._read_whole_blocks(target, offset, nbytes):
            before, buffer = offset % ALIGNMENT, self._buffer.bytes
            super()._read_direct(buffer, offset - before, before + nbytes)
            # numpy copies without Python's lock.
            np.copyto(
                np.frombuffer(target, np.uint8)[:nbytes], np.frombuffer(buffer, np.uint8)[before : before + nbytes]
            )

    def _read_whole_blocks(self, target: memoryview, offset: int, nbytes: int) -> bool:
        """Whether whole blocks could be read where they belong, at once."""
        before, head = offset % ALIGNMENT, -offset % ALIGNMENT
        middle = (nbytes - head) // ALIGNMENT * ALIGNMENT
        if middle <= 0 or (address_of(target) - offset) % ALIGNMENT:
            return False
        # Ends are small: slices of memoryviews take a fifth of numpy's time, and every read has two.
        ends, end = self._buffer.bytes, head + middle
        blocks = [ends[:ALIGNMENT], target[head:end], ends[ALIGNMENT : 2 * ALIGNMENT]]
        blocks = blocks[0 if head else 1 : 3 if nbytes > end else 2]
        if os.preadv(self._descriptor, blocks, offset - before) < before + nbytes:
            return False
        target[:head] = ends[before : before + head]
        target[end:nbytes] = ends[ALIGNMENT : ALIGNMENT + nbytes - end]
        return True


class HostBytes:
    """A range of host memory that is copied without holding Python's lock."""

    def __init__(self, memory: memoryview) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)

    def read(self, target: memoryview, offset: int, nbytes: int) -> None:
        np.copyto(np.frombuffer(target, np.uint8)[:nbytes], self._bytes[offset : offset + nbytes])

    def close(self) -> None:
        """Does nothing: the memory belongs to its owner."""


def _open(path: Path) -> tuple[int, bool]:
    """(descriptor, whether direct reads work); some file systems accept O_DIRECT on open but refuse the read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    else:
        try:
            os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT)], 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno != errno.EINVAL:
                raise
        else:
            return descriptor, True
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False


def _ended(position: int) -> OSError:
    return OSError(errno.ENODATA, f"the file ends at byte {position}")


# With this size, reading is as fast as bare reads into as much memory; larger chunks are slower (`bench.micro reads`).
CHUNK_NBYTES = 1 << 20
NUM_THREADS = 4
RETRY_SECONDS = (0.02, 0.1, 0.3)
_JOIN_SECONDS = 5.0
# A stuck reader will not return, so that closing after a failure does not wait long for it.
_JOIN_FAILED_SECONDS = 0.2
_PATIENCE_SECONDS = 0.25


@dataclass(slots=True, eq=False)
class Fetch:
    """A pending read of one shard into `target`; done when all its chunks have arrived and its checksum matches."""

    shard: Shard
    target: memoryview
    after: SyncPoint | None
    chunks_left: int
    done: bool = False

    def query(self) -> bool:
        return self.done


class ReaderLane:
    """A Lane whose compute runs on the calling thread, or passes its own SyncPoint when it releases a slot.

    `memory` contains the slots and is aligned to ALIGNMENT. `sources` are keyed by the `file` of the shards and are
    closed with the lane. After the first error, every `start` and `wait` raises StreamBroken with its cause.
    """

    most_together = 1

    def __init__(
        self,
        sources: Mapping[Path | None, Source],
        memory: memoryview,
        num_threads: int = NUM_THREADS,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self._sources = sources
        self._memory = memory
        self._chunk_nbytes = chunk_nbytes
        self._chunks: deque[tuple[Fetch, ShardPart]] = deque()
        self._verified: set[Shard] = set()
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        lock = threading.Lock()
        self._wanted = threading.Condition(lock)
        self._arrived = threading.Condition(lock)
        self._num_fetches = 0
        self._busy_since = 0.0
        self._seconds_busy = 0.0
        self.nbytes_moved = 0
        self.seconds_waited = 0.0
        self._threads = [
            threading.Thread(target=self._serve, name=f"reader-{index}", daemon=True) for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, run: Run, after: SyncPoint | None) -> Fetch:
        ((shard, slot),) = run
        if shard.offset % ALIGNMENT and not shard.parts:
            raise ValueError(f"{shard} begins at byte {shard.offset}; wanted a multiple of {ALIGNMENT}")
        nbytes = slot.nbytes if shard.parts else -(-slot.nbytes // ALIGNMENT) * ALIGNMENT
        if slot.offset + nbytes > len(self._memory):
            raise ValueError(f"{slot} is outside the {len(self._memory)} bytes that readers fill")
        chunks = self._cut(shard)
        fetch = Fetch(shard, self._memory[slot.offset :], after, len(chunks))
        with self._wanted:
            self._raise_failure()
            if not self._num_fetches:
                self._busy_since = time.perf_counter()
            self._num_fetches += 1
            self._chunks.extend((fetch, chunk) for chunk in chunks)
            self._wanted.notify(len(chunks))
        return fetch

    def _cut(self, shard: Shard) -> list[ShardPart]:
        """What is read at a time."""
        size, chunks = self._chunk_nbytes, []
        for file, offset, begin, nbytes in shard.parts or (ShardPart(shard.file, shard.offset, 0, shard.nbytes),):
            # Chunks end at whole blocks of the file, so that no block is read twice in between.
            edges = [-(-(offset + at) // ALIGNMENT) * ALIGNMENT - offset for at in range(size, nbytes, size)]
            if edges and edges[-1] >= nbytes:
                edges.pop()
            chunks += [ShardPart(file, offset + at, begin + at, end - at) for at, end in pairwise((0, *edges, nbytes))]
        return chunks

    def wait(self, ready: Fetch) -> None:
        if ready.query():
            return
        begin = time.perf_counter()
        with self._arrived:
            while not ready.query():
                self._raise_failure()
                self._arrived.wait(_PATIENCE_SECONDS)
        self.seconds_waited += time.perf_counter() - begin

    @property
    def seconds_busy(self) -> float:
        """Seconds during which there was something to read."""
        with self._wanted:
            running = time.perf_counter() - self._busy_since if self._num_fetches else 0.0
            return self._seconds_busy + running

    def mark_used(self) -> None:
        """Returns None: compute on the calling thread is done when it returns."""

    def fail(self, cause: BaseException) -> None:
        """Makes everyone who waits raise StreamBroken from `cause`; only the first cause counts."""
        with self._wanted:
            self._failure = self._failure or cause
            self._chunks.clear()
            self._ended.set()
            self._wanted.notify_all()
            self._arrived.notify_all()

    def close(self) -> None:
        """Ends the reader threads and closes the sources."""
        deadline = time.monotonic() + (_JOIN_SECONDS if self._failure is None else _JOIN_FAILED_SECONDS)
        self.fail(StreamBroken("the lane is closed; nothing further arrives"))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A thread that hangs in a read keeps its memory alive by itself; its descriptor must stay open, too.
        if not any(thread.is_alive() for thread in self._threads):
            sources, self._sources = self._sources, {}
            for source in sources.values():
                source.close()

    def _serve(self) -> None:
        try:
            while chunk := self._next_chunk():
                self._fetch(*chunk)
        except BaseException as error:
            # Whatever ends a reader, SystemExit included, must reach the thread that waits for its bytes.
            self.fail(error)

    def _next_chunk(self) -> tuple[Fetch, ShardPart] | None:
        with self._wanted:
            while not self._chunks and not self._ended.is_set():
                self._wanted.wait()
            return None if self._ended.is_set() else self._chunks.popleft()

    def _fetch(self, fetch: Fetch, chunk: ShardPart) -> None:
        if fetch.after is not None:
            fetch.after.synchronize()
        self._read(fetch, chunk)
        with self._wanted:
            self.nbytes_moved += chunk.nbytes
            fetch.chunks_left -= 1
            last = fetch.chunks_left == 0
        if last:
            self._verify(fetch)
            with self._arrived:
                fetch.done = True
                self._num_fetches -= 1
                if not self._num_fetches:
                    self._seconds_busy += time.perf_counter() - self._busy_since
                self._arrived.notify_all()

    def _read(self, fetch: Fetch, chunk: ShardPart) -> None:
        target = fetch.target[chunk.begin :]
        for pause in (*RETRY_SECONDS, None):
            try:
                self._sources[chunk.file].read(target, chunk.offset, chunk.nbytes)
                return
            except OSError as error:
                if error.errno != errno.EIO or pause is None or self._ended.wait(pause):
                    what = f"{chunk.file}: {chunk.nbytes} bytes at {chunk.offset} ({fetch.shard.name})"
                    raise StreamBroken(f"{what} could not be read: {error}") from error

    def _verify(self, fetch: Fetch) -> None:
        shard = fetch.shard
        if shard.crc32 is None or shard in self._verified:
            return
        found = 0
        for _, _, begin, nbytes in shard.parts or (ShardPart(shard.file, shard.offset, 0, shard.nbytes),):
            found = zlib.crc32(fetch.target[begin : begin + nbytes], found)
        if found != shard.crc32:
            raise StreamBroken(
                f"{shard.file}: {shard.name} has checksum {found:08x}, wanted {shard.crc32:08x}; the file is damaged, "
                f"{'download the checkpoint' if shard.parts else 'prepare the model'} again"
            )
        self._verified.add(shard)

    def _raise_failure(self) -> None:
        if self._failure is None and not all(thread.is_alive() for thread in self._threads):
            self._failure = RuntimeError("a reader thread ended without an error")
        if self._failure is not None:
            message = str(self._failure) or type(self._failure).__name__
            raise StreamBroken(f"weights stopped arriving: {message}") from self._failure
