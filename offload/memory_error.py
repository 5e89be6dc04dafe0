"""Which errors say that memory gave out, of the host or of a device. Torch-free."""

from __future__ import annotations

import errno
import re

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
