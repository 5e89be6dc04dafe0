"""One writer or many readers of a store. The kernel drops a lock with the process that held it: none goes stale."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from .errors import BadStore, StoreInUse

LOCK = "lock"


def lock_to_write(folder: Path) -> int:
    """The descriptor that holds the lock until it is closed. Raises StoreInUse if anybody has the store."""
    return _lock(
        folder,
        os.O_RDWR | os.O_CREAT,
        fcntl.LOCK_EX,
        f"{folder} is used or written by another process, wanted it alone; wait until that one has ended",
    )


def lock_to_use(folder: Path) -> int:
    """As `lock_to_write`, shared with other users of the store."""
    return _lock(
        folder,
        os.O_RDONLY,
        fcntl.LOCK_SH,
        f"{folder} is being written by another process, wanted a finished store; wait until that one has ended",
    )


def _lock(folder: Path, flags: int, kind: int, refusal: str) -> int:
    path = folder / LOCK
    while True:
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except (FileNotFoundError, NotADirectoryError):
            raise BadStore(f"{folder} is not a store: no file {LOCK!r} in it; run `moedge prepare`") from None
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            if _still_there(descriptor, path):
                return descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise StoreInUse(refusal) from None
            raise
        os.close(descriptor)


def _still_there(descriptor: int, path: Path) -> bool:
    """Whether the name still means this file: whoever had the lock before may have removed the store."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
