"""Bytes set aside on the journal's disk, so that a job can still save what it has and stop when the disk is full."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

BALLAST_NBYTES = 4 << 20


class Ballast:
    """A file of reserved blocks; without a path, none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def fill(self) -> None:
        """Takes the room; where there is none, the job's first answer will say so."""
        if self._path is None or (self._path.exists() and self._path.stat().st_size == BALLAST_NBYTES):
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, BALLAST_NBYTES)
            finally:
                os.close(descriptor)
        except OSError:
            self.drop()

    def drop(self) -> bool:
        """Gives the room back; whether there was any."""
        if self._path is None or not self._path.exists():
            return False
        with suppress(OSError):
            os.unlink(self._path)
        return True
