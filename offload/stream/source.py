"""Where reader threads fetch bytes from: a file past the page cache, or a stretch of host memory.

Knows no shards, threads or retries. Torch-free.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Protocol

import numpy as np

from .ring import ALIGNMENT


class Source(Protocol):
    def read(self, room: memoryview, offset: int, nbytes: int) -> None:
        """Fills `room[:nbytes]` from `offset`; what follows in `room` may be overwritten. Raises OSError."""
        ...

    def close(self) -> None: ...


class DirectFile:
    """A file read with O_DIRECT, or through the page cache and dropped from it where the file system refuses that.

    One descriptor for life: a file renamed or removed meanwhile is still read whole, one that is edited, cut or grown
    is noticed after the read that it spoiled. Offsets and rooms are multiples of ALIGNMENT.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor, self.direct = _open(path)
        self._opened = self._state()

    def read(self, room: memoryview, offset: int, nbytes: int) -> None:
        if self.direct:
            self._read_direct(room, offset, nbytes)
        else:
            self._read_cached(room, offset, nbytes)
        if self._state() != self._opened:
            raise OSError(errno.ESTALE, "the file changed after it was opened")

    def close(self) -> None:
        os.close(self._descriptor)

    def _state(self) -> tuple[int, int, int]:
        status = os.fstat(self._descriptor)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read_direct(self, room: memoryview, offset: int, nbytes: int) -> None:
        """Whole aligned blocks: the last one reaches past `nbytes`, or to the end of the file."""
        padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        position = 0
        while position < nbytes:
            read = os.preadv(self._descriptor, [room[position:padded]], offset + position)
            if position + read >= nbytes:
                return
            # A short read goes on from the last whole block: the kernel refuses to start inside one.
            advance = read - read % ALIGNMENT
            if not advance:
                raise _ended(offset + position + read)
            position += advance

    def _read_cached(self, room: memoryview, offset: int, nbytes: int) -> None:
        position = 0
        while position < nbytes:
            read = os.preadv(self._descriptor, [room[position:nbytes]], offset + position)
            if not read:
                raise _ended(offset + position)
            position += read
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


class HostBytes:
    """A stretch of host memory, copied without holding the interpreter."""

    def __init__(self, memory: memoryview) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)

    def read(self, room: memoryview, offset: int, nbytes: int) -> None:
        np.copyto(np.frombuffer(room, np.uint8)[:nbytes], self._bytes[offset : offset + nbytes])

    def close(self) -> None:
        """Nothing is held that the memory's owner would miss."""


def _open(path: Path) -> tuple[int, bool]:
    """(descriptor, whether direct reads work on it); some file systems accept the flag and refuse the read."""
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
