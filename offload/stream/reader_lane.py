"""Reader threads that fetch shards into host memory: from files, or from host memory that cannot be pinned.

Shards are cut into chunks, so that all threads work on the one that is wanted first. Torch-free.
"""

from __future__ import annotations

import errno
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .lane import Mark, Shard, StreamBroken
from .ring import ALIGNMENT, Place
from .source import Source

# As fast as bare reads into memory of the ring's size; larger chunks are slower (bench/reader_lane.py).
CHUNK_NBYTES = 1 << 20
NUM_THREADS = 4
RETRY_SECONDS = (0.02, 0.1, 0.3)
_JOIN_SECONDS = 5.0
# A reader that is stuck will not come back: whoever stops because of it should not wait for it.
_JOIN_FAILED_SECONDS = 0.2
_PATIENCE_SECONDS = 0.25


@dataclass(slots=True, eq=False)
class Fetch:
    """One shard on its way into `room`; ready when all its chunks are there and its checksum holds."""

    shard: Shard
    room: memoryview
    after: Mark | None
    chunks_left: int
    done: bool = False

    def query(self) -> bool:
        return self.done


class ReaderLane:
    """A Lane whose compute runs on the calling thread, or names its own mark when it gives a place back.

    `memory` is what places lie in, aligned to ALIGNMENT; `sources` by the `file` of the shards to come, closed with
    the lane. After the first error everyone who waits or starts gets StreamBroken with its cause.
    """

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
        self._chunks: deque[tuple[Fetch, int]] = deque()
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

    def start(self, shard: Shard, place: Place, after: Mark | None) -> Fetch:
        if shard.offset % ALIGNMENT:
            raise ValueError(f"{shard} begins at byte {shard.offset}, wanted a multiple of {ALIGNMENT}")
        if place.offset + -(-place.nbytes // ALIGNMENT) * ALIGNMENT > len(self._memory):
            raise ValueError(f"{place} lies outside the {len(self._memory)} bytes that readers fill")
        begins = range(0, shard.nbytes, self._chunk_nbytes)
        fetch = Fetch(shard, self._memory[place.offset :], after, len(begins))
        with self._wanted:
            self._raise_failure()
            if not self._num_fetches:
                self._busy_since = time.perf_counter()
            self._num_fetches += 1
            self._chunks.extend((fetch, begin) for begin in begins)
            self._wanted.notify(len(begins))
        return fetch

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
        """How long there was something to read."""
        with self._wanted:
            running = time.perf_counter() - self._busy_since if self._num_fetches else 0.0
            return self._seconds_busy + running

    def mark_used(self) -> None:
        """Compute that runs on the calling thread is done when it returns."""

    def fail(self, cause: BaseException) -> None:
        """Wakes everyone who waits, with StreamBroken from `cause`; the first cause stays."""
        with self._wanted:
            self._failure = self._failure or cause
            self._chunks.clear()
            self._ended.set()
            self._wanted.notify_all()
            self._arrived.notify_all()

    def close(self) -> None:
        deadline = time.monotonic() + (_JOIN_SECONDS if self._failure is None else _JOIN_FAILED_SECONDS)
        self.fail(StreamBroken("the lane is closed; nothing further arrives"))
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # A thread that hangs in a read keeps its memory alive by itself; its descriptor must stay its own too.
        if not any(thread.is_alive() for thread in self._threads):
            sources, self._sources = self._sources, {}
            for source in sources.values():
                source.close()

    def _serve(self) -> None:
        try:
            while chunk := self._next_chunk():
                self._fetch(*chunk)
        except BaseException as error:
            # Whatever ends a reader, SystemExit too, must reach the one who waits for its bytes.
            self.fail(error)

    def _next_chunk(self) -> tuple[Fetch, int] | None:
        with self._wanted:
            while not self._chunks and not self._ended.is_set():
                self._wanted.wait()
            return None if self._ended.is_set() else self._chunks.popleft()

    def _fetch(self, fetch: Fetch, begin: int) -> None:
        if fetch.after is not None:
            fetch.after.synchronize()
        nbytes = min(self._chunk_nbytes, fetch.shard.nbytes - begin)
        self._read(fetch, begin, nbytes)
        with self._wanted:
            self.nbytes_moved += nbytes
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

    def _read(self, fetch: Fetch, begin: int, nbytes: int) -> None:
        shard, room = fetch.shard, fetch.room[begin:]
        offset = shard.offset + begin
        for pause in (*RETRY_SECONDS, None):
            try:
                self._sources[shard.file].read(room, offset, nbytes)
                return
            except OSError as error:
                if error.errno != errno.EIO or pause is None or self._ended.wait(pause):
                    what = f"{shard.file}: {nbytes} bytes at {offset} ({shard.name})"
                    raise StreamBroken(f"{what} could not be read: {error}") from error

    def _verify(self, fetch: Fetch) -> None:
        shard = fetch.shard
        if shard.crc32 is None or shard in self._verified:
            return
        found = zlib.crc32(fetch.room[: shard.nbytes])
        if found != shard.crc32:
            raise StreamBroken(
                f"{shard.file}: {shard.name} has checksum {found:08x}, wanted {shard.crc32:08x}; the file is damaged, "
                "prepare the model again"
            )
        self._verified.add(shard)

    def _raise_failure(self) -> None:
        if self._failure is None and not all(thread.is_alive() for thread in self._threads):
            self._failure = RuntimeError("a reader thread died without a word")
        if self._failure is not None:
            message = str(self._failure) or type(self._failure).__name__
            raise StreamBroken(f"weights stopped arriving: {message}") from self._failure
