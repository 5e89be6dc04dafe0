"""What can be wrong with bytes and the places that hold them."""

from __future__ import annotations

import errno
from contextlib import suppress


class BadCheckpoint(Exception):
    """A checkpoint's files are missing, damaged or not what they claim; no weight of it was used."""


class OutOfBudget(Exception):
    """More bytes were asked of a tier than its budget holds."""


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, the system's, and torch's of a device and of the host.

    torch's are told by their names, so that commands that need no torch do not load it; the host's is a RuntimeError
    that only its text tells from others.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def swallow_cuda_error() -> None:
    """Launches a kernel that takes the blame for an earlier refusal, such as that of cudaHostRegister.

    The runtime keeps the error until the next launch asks for it, and torch does not expose cudaGetLastError.
    """
    import torch

    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


class BadStore(Exception):
    """A folder that is no finished, sound store of this version; nothing of it was used."""


class StoreInUse(Exception):
    """Another process writes the store, or uses it while it was to be written or removed."""


class DiskFull(Exception):
    """The disk filled up while a store was written; finished files are kept and the next run continues."""
