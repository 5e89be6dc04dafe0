"""A file that appears under its name whole and on disk, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


class NewFile:
    """Written under another name on the same disk; `publish` gives it its own, replacing what has it."""

    def __init__(self, path: Path, hidden: Path | None = None) -> None:
        self.path = path
        # The process id keeps a second job for the same name from writing into this one's file.
        self.hidden = hidden or path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file = self.hidden.open("w+b")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        """What was written can be read under the hidden name."""
        self._file.flush()

    def publish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.hidden.replace(self.path)
        _sync_folder(self.path.parent)

    def discard(self) -> None:
        self._file.close()
        self.hidden.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename is on disk only when the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
