"""Who may use a store: files that only this user or root can have written, and one writer or many readers at a time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from ..errors import BadStore, StoreInUse

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


def open_trusted(path: Path) -> int:
    """A descriptor to read from. Raises FileNotFoundError, or BadStore for what is not a plain file of ours."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadStore(f"{path} cannot be opened ({error.strerror}), wanted a plain file") from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise BadStore(f"{path} is not a plain file; prepare the model again in another folder")
        refuse_untrusted(info, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_untrusted(info: os.stat_result, path: Path) -> None:
    if info.st_mode & stat.S_IWOTH:
        raise BadStore(
            f"everybody may write to {path}, wanted only its owner to; run `chmod o-w` on it if you trust it"
        )
    # Root may use what others own: in containers it is the usual user of mounted folders.
    if os.geteuid() not in (0, info.st_uid) and info.st_uid != 0:
        raise BadStore(
            f"{path} belongs to user {info.st_uid}, wanted {os.geteuid()} or root; prepare a store of your own"
        )
