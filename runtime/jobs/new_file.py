"""A file that appears under its name whole and on disk, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


class NewFile:
    """Written under a hidden name in the same folder; `publish` gives it its name, replacing what has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The process id keeps a second job for the same name from writing into this one's file.
        self._hidden = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file = self._hidden.open("w+b")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def lines(self) -> Iterator[bytes]:
        """What was written so far; write nothing more afterwards."""
        self._file.seek(0)
        return iter(self._file)

    def publish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._hidden.replace(self.path)
        _sync_folder(self.path.parent)

    def discard(self) -> None:
        self._file.close()
        self._hidden.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename is on disk only when the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
