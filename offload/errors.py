"""What can be wrong with bytes and the places that hold them."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class BadCheckpoint(Exception):
    """A checkpoint's files are missing, damaged or not what they claim; no weight of it was used."""


class OutOfBudget(Exception):
    """More bytes were asked of a tier than its budget holds."""


# What torch, CUDA's libraries and Triton say in a RuntimeError. Only the whole phrase counts: other errors of CUDA, and
# a kernel that wants more shared memory than a GPU has, are mended by no smaller plan.
_SAID = re.compile(
    r"DefaultCPUAllocator"
    r"|CUDA (driver )?error: out of memory"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|CU(BLAS|DNN|SOLVER|SPARSE|FFT)_(STATUS_)?ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|cudaHostAlloc\b.*(failed|out of memory)"
    r"|Cannot allocate memory|std::bad_alloc"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, the system's, and those of torch, of CUDA's libraries and of Triton.

    torch's own class is told by its name, so that commands that need no torch do not load it; all else that is not
    Python's comes as a RuntimeError, or one of its kinds, that only its text tells from others.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


_spare: list[torch.Tensor] = []


def prepare_to_swallow() -> None:
    """Allocates what `swallow_cuda_error` writes to, while there is memory."""
    import torch

    if not _spare:
        _spare.append(torch.empty(1, device="cuda"))


def swallow_cuda_error() -> None:
    """Launches a kernel that takes the blame for an earlier refusal, such as that of cudaHostRegister.

    The runtime keeps the error until the next launch asks for it, and torch does not expose cudaGetLastError. The
    kernel allocates nothing: an allocator that refuses would do so before the launch, and the error would stay.
    """
    with suppress(RuntimeError):
        prepare_to_swallow()
        _spare[0].fill_(1)


class BadStore(Exception):
    """A folder that is no finished, sound store of this version; nothing of it was used."""


class StoreInUse(Exception):
    """Another process writes the store, or uses it while it was to be written or removed."""


class DiskFull(Exception):
    """The disk filled up while a store was written; finished files are kept and the next run continues."""
