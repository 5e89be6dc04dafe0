"""Opens what only this user or root can have written: no links, no devices, nothing that everybody may change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import BadStore


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
