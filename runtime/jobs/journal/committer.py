"""The one thread that makes a journal's bytes durable, and says up to where they are.

Writing and making durable are apart: a slow disk delays what counts as done, never the next pass. Whatever was written
while the last fdatasync ran goes with the next one.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...settings.errors import JournalFailed

# Rows that finish within this time share one fdatasync.
LINGER_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a record in the journal: the byte after it, and how many rows had answers and errors by then."""

    end: int = 0
    ok: int = 0
    failed: int = 0


class Committer:
    """Owns no file: it synchronizes `descriptor` until it is closed. A failed fdatasync is never tried again."""

    def __init__(self, descriptor: int, synced: Mark) -> None:
        self._descriptor = descriptor
        lock = threading.Lock()
        # Apart, so that a row that is written does not wake a thread that waits for something else.
        self._work = threading.Condition(lock)
        self._hurry = threading.Condition(lock)
        self._settled = threading.Condition(lock)
        self._written = synced
        self._synced = synced
        self._urgent = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="committer", daemon=True)
        self._thread.start()

    @property
    def synced(self) -> Mark:
        """What is on disk for certain."""
        return self._synced

    def written(self, mark: Mark) -> None:
        """Tells that the file reaches up to `mark`. Raises JournalFailed once the disk has failed."""
        with self._work:
            self._raise_failure()
            self._written = mark
            self._work.notify()

    def wait(self) -> None:
        """Returns when all that was written is on disk. Raises JournalFailed where it never will be."""
        with self._settled:
            self._urgent = True
            self._hurry.notify()
            while self._synced != self._written:
                self._raise_failure()
                self._settled.wait()
            self._raise_failure()

    def check(self) -> None:
        """Raises JournalFailed once the disk has failed."""
        self._raise_failure()

    def close(self) -> None:
        """Ends the thread; what was not synchronized may be lost with the power, and with it only."""
        with self._work:
            self._closed = True
            self._work.notify()
            self._hurry.notify()
        self._thread.join()

    def _serve(self) -> None:
        while (mark := self._next()) is not None:
            try:
                os.fdatasync(self._descriptor)
            except BaseException as error:
                # Whatever it is, it must reach the one who waits.
                self._settle(failure=error)
                return
            self._settle(synced=mark)

    def _next(self) -> Mark | None:
        with self._work:
            self._work.wait_for(lambda: self._closed or self._synced != self._written)
            self._hurry.wait_for(lambda: self._closed or self._urgent, LINGER_SECONDS)
            self._urgent = False
            return None if self._closed else self._written

    def _settle(self, synced: Mark | None = None, failure: BaseException | None = None) -> None:
        with self._settled:
            self._synced = synced or self._synced
            self._failure = failure
            self._settled.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            # The kernel may have dropped the pages it could not write: a second fsync would report success for them.
            raise JournalFailed(
                f"the journal could not be written to disk ({self._failure}); rows confirmed before are safe. "
                "Look after the disk, then start the same command again"
            ) from self._failure


BALLAST_NBYTES = 4 << 20


class Ballast:
    """A file of reserved blocks; without a path, none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def fill(self) -> None:
        """Reserves the blocks; where the disk has none, the job's first answer will say so."""
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
        """Frees the blocks; whether there were any."""
        if self._path is None or not self._path.exists():
            return False
        with suppress(OSError):
            os.unlink(self._path)
        return True
