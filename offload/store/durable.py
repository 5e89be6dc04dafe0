"""A file that appears under its name whole and on disk, or not at all. Knows nothing of what is in it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"
# Dirty pages count against a container's memory, so they are handed to the disk this often.
_FLUSH_NBYTES = 64 << 20


class NewFile:
    """Written under a hidden name in the same folder; `publish` gives it its name, replacing what has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
        self._descriptor = os.open(self._hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._unflushed = 0

    def write_at(self, offset: int, view: memoryview) -> None:
        """All of `view`, a run of uint8."""
        position = 0
        while position < view.nbytes:
            position += os.pwrite(self._descriptor, view[position:], offset + position)
        self._unflushed += view.nbytes
        if self._unflushed >= _FLUSH_NBYTES:
            self._flush()

    def publish(self) -> None:
        self._flush()
        self._close()
        os.replace(self._hidden, self.path)
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Nothing remains, unless it was published."""
        self._close()
        with suppress(FileNotFoundError):
            os.unlink(self._hidden)

    def _flush(self) -> None:
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """`path` holds `data` and nothing else, on disk; killed at any point, it holds what it held before."""
    file = NewFile(path)
    try:
        file.write_at(0, memoryview(data))
        file.publish()
    except BaseException:
        file.discard()
        raise


def rename(source: Path, target: Path) -> None:
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """New names, and names that are gone, are on disk only when the folder is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
