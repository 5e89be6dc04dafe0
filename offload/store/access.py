"""Access to a store: only files that this user or root wrote, and either one writer or many readers at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from ..errors import BadStore, StoreInUse, is_exhausted

LOCK = "lock"


def lock_to_write(folder: Path) -> int:
    """Takes the exclusive lock; returns the descriptor that holds it until it is closed. Raises StoreInUse."""
    return _lock(
        folder,
        os.O_RDWR | os.O_CREAT,
        fcntl.LOCK_EX,
        f"{folder} is in use by another process, wanted exclusive access; wait until that process has ended",
    )


def lock_to_use(folder: Path) -> int:
    """Takes the lock like `lock_to_write`, but shares it with other readers of the store."""
    return _lock(
        folder,
        os.O_RDONLY,
        fcntl.LOCK_SH,
        f"{folder} is being written by another process, wanted a finished store; wait until that process has ended",
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
    """Whether the path still names this file: the previous holder of the lock may have removed the store."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def open_trusted(path: Path) -> int:
    """Opens a file for reading. Raises FileNotFoundError, or BadStore if it is not a regular file that we trust."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_exhausted(error):
            raise
        raise BadStore(f"{path} cannot be opened ({error.strerror}), wanted a regular file") from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise BadStore(f"{path} is not a regular file; prepare the model again in another folder")
        refuse_untrusted(info, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_untrusted(info: os.stat_result, path: Path) -> None:
    """Raises BadStore if anybody but this user or root can have written `path`."""
    if info.st_mode & stat.S_IWOTH:
        raise BadStore(
            f"everybody may write to {path}, wanted only its owner to; run `chmod o-w` on it if you trust it"
        )
    # Root may use files of other owners: in containers, root usually works in mounted folders.
    if os.geteuid() not in (0, info.st_uid) and info.st_uid != 0:
        raise BadStore(
            f"{path} belongs to user {info.st_uid}, wanted {os.geteuid()} or root; prepare a store of your own"
        )
