"""The family of errors that moedge raises on purpose, each with its exit code, and those of bytes and their tiers."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class ExitCode(IntEnum):
    """What the process ends with; docs/exit-codes.md is the page for people."""

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
        """What to do about any error of this code, in one sentence."""
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
    """An error that moedge foresees and raises on purpose.

    The message says what was found, what was wanted and what to do. `exit_code` is what a command ends with that
    raises it. Every exception class of the package is one of these, except those that never leave it.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.BUG

    @property
    def advice(self) -> str:
        """What to do about an error of this kind where the message does not say more."""
        return self.exit_code.advice


def exit_code_of(error: BaseException) -> ExitCode:
    """The code of an error that moedge foresees, memory that gave out included; BUG for every other."""
    if is_out_of_memory(error):
        return ExitCode.GAVE_OUT
    return error.exit_code if isinstance(error, MoedgeError) else ExitCode.BUG


class BadCheckpoint(MoedgeError):
    """A checkpoint's files are missing, damaged or not what they claim; no weight of it was used."""

    exit_code = ExitCode.MODEL


class OutOfBudget(MoedgeError):
    """More bytes were asked of a tier than its budget holds."""

    exit_code = ExitCode.DOES_NOT_FIT


class BadStore(MoedgeError):
    """A folder that is no finished, sound store of this version; nothing of it was used."""

    exit_code = ExitCode.MODEL


class StoreInUse(MoedgeError):
    """Another process writes the store, or uses it while it was to be written or removed."""

    exit_code = ExitCode.ENVIRONMENT


class DiskFull(MoedgeError):
    """The disk filled up while a store was written; finished files are kept and the next run continues."""

    exit_code = ExitCode.GAVE_OUT


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
    """Whether memory gave out: an error of Python's, the system's, torch's, of CUDA's libraries or of Triton.

    torch's own class is recognized by its name, so that commands that need no torch do not load it; everything
    else that is not Python's is a RuntimeError that only its text tells from others.
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
