"""Opens files of an untrusted folder: none outside of it, and none that would block. Torch-free."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import BadCheckpoint


def open_inside(folder: Path, name: str) -> int:
    """Opens a regular file in `folder` for reading and returns its descriptor; `name` has no path separator.

    A link may point into the folder, or to the blobs of the hub cache if the folder is a snapshot of it. Any other link
    would let a checkpoint read any file of the machine. Raises BadCheckpoint.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(root) for root in _roots(folder.resolve(strict=True))):
            raise BadCheckpoint(f"{path} is a link to {real}, wanted a file in the folder; copy it there")
        # Without O_NONBLOCK, opening a pipe waits for its other end.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing; download the checkpoint again") from None
    except (OSError, RuntimeError) as error:
        raise BadCheckpoint(f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadCheckpoint(f"{path} is a folder, pipe or device, wanted a file")
    return descriptor


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """The bytes of a file that has at most `most` of them. Raises BadCheckpoint."""
    descriptor = open_inside(folder, name)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadCheckpoint(f"{folder / name}: {os.path.getsize(folder / name)} bytes, at most {most} are read")
    return data


def blob_id(folder: Path, name: str) -> str | None:
    """The hub's hash of a file that is a link into the blobs of a cache; None for any other file."""
    real = (folder / name).resolve()
    return real.name if real.parent in _roots(folder.resolve())[1:] else None


def _roots(folder: Path) -> list[Path]:
    """The folders that links may point into: models--x/snapshots/REVISION has its bytes in models--x/blobs."""
    return [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
