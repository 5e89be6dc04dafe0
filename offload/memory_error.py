"""Which errors say that memory gave out, of the host or of a device. Torch-free."""

from __future__ import annotations

import errno


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, the system's, and torch's of a device and of the host.

    torch's are told by their names, so that commands that need no torch do not load it; the host's is a RuntimeError
    that only its text tells from others.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
