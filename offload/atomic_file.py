"""Writes a file that appears under its name complete and synced to disk, or not at all; and locks files. Does not know
their contents."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

TEMPORARY_SUFFIX = ".tmp"
# Dirty pages count against a container's memory, so they are flushed to disk every so often (bytes).
_FLUSH_NBYTES = 64 << 20
_BUFFER_NBYTES = 1 << 20


class AtomicFile:
    """A file that is written under a hidden name; `publish` renames it to its own name and replaces an existing file.

    The data and the folder are synced before `publish` returns. Use either `write`, which appends, or `write_at`, not
    both.
    """

    def __init__(self, path: Path, hidden: Path | None = None) -> None:
        """`hidden` is `.NAME.tmp` by default, which is safe if only one process writes `path`; a file that a killed
        process left under this name is removed. Use `own_name` for files that several processes may write."""
        self.path = path
        self.hidden = hidden or path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
        self._descriptor = _create(self.hidden)
        self._buffer = bytearray()
        self._end = 0
        self._unflushed = 0

    def __enter__(self) -> Self:
        """A context that discards the file, unless it was published."""
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def write(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= _BUFFER_NBYTES:
            self.flush()

    def write_at(self, offset: int, view: memoryview) -> None:
        """Writes all bytes of `view`, uint8, at `offset`."""
        position = 0
        while position < view.nbytes:
            position += os.pwrite(self._descriptor, view[position:], offset + position)
        self._unflushed += view.nbytes
        if self._unflushed >= _FLUSH_NBYTES:
            self._sync()

    def flush(self) -> None:
        """Makes everything written so far readable under the hidden name."""
        data, self._buffer = self._buffer, bytearray()
        if data:
            self.write_at(self._end, memoryview(data))
            self._end += len(data)

    def publish(self) -> None:
        self.flush()
        self._sync()
        self._close()
        rename(self.hidden, self.path)

    def discard(self) -> None:
        """Removes the file, unless it was published."""
        self._close()
        self.hidden.unlink(missing_ok=True)

    def _sync(self) -> None:
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _create(path: Path) -> int:
    """The descriptor of a new file; an existing file or link of that name is removed, never opened."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o644)


def own_name(path: Path) -> Path:
    """Returns a hidden name for `path` that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")


def write_atomically(path: Path, data: bytes, hidden: Path | None = None) -> None:
    """Replaces the contents of `path`, synced to disk. If the process is killed, they are the old or the new ones."""
    file = AtomicFile(path, hidden)
    try:
        file.write(data)
        file.publish()
    except BaseException:
        file.discard()
        raise


def rename(source: Path, target: Path) -> None:
    """Renames `source` to `target`, which it replaces; the rename is synced to disk when this returns."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Syncs a folder: created, renamed and removed names are on disk only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(path: Path, flags: int, kind: int, mode: int) -> int | None:
    """The descriptor that holds the lock of a file until it is closed; None where the file was removed meanwhile.

    `flags` open it, `kind` is one of `fcntl.LOCK_*`. Raises BlockingIOError where somebody else holds it, and OSError.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
