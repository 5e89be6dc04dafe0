"""The errors that moedge raises on purpose, each with its exit code: the base class and the errors of this floor.

Also recognizes errors that mean that memory ran out, and clears CUDA's pending error. Torch is imported only when a
function needs it.
"""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class ExitCode(IntEnum):
    """The exit codes of the process; docs/reference.md explains them."""

    OK = 0
    BUG = 1
    USAGE = 2
    SOME_ROWS_FAILED = 3
    DOES_NOT_FIT = 4
    MODEL = 5
    ENVIRONMENT = 6
    INPUT = 7
    GAVE_OUT = 8
    STOPPED = 75
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def advice(self) -> str:
        """What to do about any error with this code, in one sentence."""
        return _ADVICE[self]


_ADVICE = {
    ExitCode.OK: "nothing",
    ExitCode.BUG: "report it",
    ExitCode.USAGE: "see `moedge COMMAND --help`",
    ExitCode.SOME_ROWS_FAILED: "read the `.errors.jsonl` file beside the output",
    ExitCode.DOES_NOT_FIT: "change what the message names",
    ExitCode.MODEL: "use another checkpoint, or download this one again",
    ExitCode.ENVIRONMENT: "do what the message names",
    ExitCode.INPUT: "correct the lines listed, or pass `--lenient`",
    ExitCode.GAVE_OUT: "free some memory or disk, and start the same command again",
    ExitCode.STOPPED: "start the same command again",
    ExitCode.INTERRUPTED: "start the same command again",
    ExitCode.TERMINATED: "start the same command again",
}


class MoedgeError(Exception):
    """An error that moedge raises on purpose.

    The message says what was found, what was wanted and what to do. A command that raises it ends with `exit_code`.
    Every exception class of the package derives from this one, except those that never leave the package.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    @property
    def advice(self) -> str:
        """What to do about an error of this kind if the message does not say it."""
        return self.exit_code.advice


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of a MoedgeError; GAVE_OUT if memory, a disk or descriptors ran out; BUG for any other error."""
    if is_out_of_memory(error) or is_exhausted(error):
        return ExitCode.GAVE_OUT
    return error.exit_code if isinstance(error, MoedgeError) else ExitCode.BUG


class MissingPackage(MoedgeError):
    """A package that is needed is not installed; the message has the line that installs it."""

    exit_code = ExitCode.ENVIRONMENT


class BadCheckpoint(MoedgeError):
    """A checkpoint's files are missing, damaged or not what they claim; no weight of it was used."""

    exit_code = ExitCode.MODEL


class OutOfBudget(MoedgeError):
    """More bytes are needed of a tier than its budget has."""

    exit_code = ExitCode.DOES_NOT_FIT


class BadStore(MoedgeError):
    """A folder is not a complete, undamaged store of this version; nothing of it was used."""

    exit_code = ExitCode.MODEL


class StoreInUse(MoedgeError):
    """Another process is writing the store, or is using it when it was to be written or removed."""

    exit_code = ExitCode.ENVIRONMENT


class FolderRefused(MoedgeError):
    """The folder of a store cannot be made or written: the disk is read-only, or belongs to another user."""

    exit_code = ExitCode.ENVIRONMENT


class DiskFull(MoedgeError):
    """The disk filled up while a store was written; finished files are kept and the next run continues."""

    exit_code = ExitCode.GAVE_OUT


# The messages of torch, CUDA's libraries and Triton in a RuntimeError. Only the whole phrase counts: a smaller plan
# does not help against other CUDA errors, nor against a kernel that needs more shared memory than the GPU has.
_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator"
    r"|CUDA (driver )?error: out of memory"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|CU(BLAS|DNN|SOLVER|SPARSE|FFT)_(STATUS_)?ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"
    r"|cudaHostAlloc\b.*(failed|out of memory)"
    r"|Cannot allocate memory|std::bad_alloc"
    # oneDNN, for the code that it generates; what it cannot do is said of a "primitive descriptor".
    r"|^could not create a primitive$"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: an error of Python, the system, torch, one of CUDA's libraries or Triton.

    torch's own class is recognized by its name, so that commands without torch do not import it. The other libraries
    raise a RuntimeError that only its message distinguishes from others.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if type(error).__name__ == "OutOfMemoryError":
        return True
    # CPython 3.11, where its own stack of frames cannot grow.
    if isinstance(error, SystemError):
        return str(error) == "error return without exception set"
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


_EXHAUSTED = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.ENOMEM,
}


def is_exhausted(error: BaseException) -> bool:
    """Whether the system has no more of something, or a disk fails: the same command may go on later."""
    return isinstance(error, OSError) and error.errno in _EXHAUSTED


_spare: list[torch.Tensor] = []


def prepare_to_swallow() -> None:
    """Allocates the tensor that `swallow_cuda_error` writes to, while there is memory."""
    import torch

    if not _spare:
        _spare.append(torch.empty(1, device="cuda"))


def swallow_cuda_error() -> None:
    """Clears the pending CUDA error of an earlier call, such as cudaHostRegister, by launching a kernel.

    The runtime keeps the error until the next launch reports it, and torch does not expose cudaGetLastError. The kernel
    allocates nothing: if the allocator failed, it would do so before the launch, and the error would stay.
    """
    with suppress(RuntimeError):
        prepare_to_swallow()
        _spare[0].fill_(1)
