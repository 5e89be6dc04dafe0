"""Exit codes, and which refusal ends in which. docs/exit-codes.md says what to do about each."""

from __future__ import annotations

from enum import IntEnum

from ...offload.budget import BadSize
from ...offload.errors import BadCheckpoint, BadStore, DiskFull, OutOfBudget, StoreInUse, is_out_of_memory
from ...offload.stream.lane import StreamBroken
from ...quant.format import FormatError
from ...runtime.jobs.stop import STALLED_EXIT_CODE, Stalled
from ...runtime.settings.errors import (
    BadJournal,
    BadLimit,
    DoesNotFit,
    ExportFailed,
    InputChanged,
    InputRefused,
    InputUnreadable,
    JobInUse,
    JobMismatch,
    JobNotFound,
    JournalFailed,
    MemoryGaveOut,
    MissingExtra,
    ModelNotFound,
    OtherVersion,
    OutputRefused,
    SettingError,
    UnsupportedModel,
)
from ...runtime.text.errors import PromptError, TokenizerError
from .configured_command import ConfigError


class ExitCode(IntEnum):
    OK = 0
    BUG = 1
    USAGE = 2
    SOME_ROWS_FAILED = 3
    DOES_NOT_FIT = 4
    MODEL = 5
    ENVIRONMENT = 6
    INPUT = 7
    GAVE_OUT = 8
    STOPPED = STALLED_EXIT_CODE
    INTERRUPTED = 130
    TERMINATED = 143


OF_ERROR: dict[type[Exception], ExitCode] = {
    BadCheckpoint: ExitCode.MODEL,
    BadJournal: ExitCode.GAVE_OUT,
    BadLimit: ExitCode.USAGE,
    BadSize: ExitCode.USAGE,
    BadStore: ExitCode.MODEL,
    ConfigError: ExitCode.USAGE,
    DiskFull: ExitCode.GAVE_OUT,
    DoesNotFit: ExitCode.DOES_NOT_FIT,
    ExportFailed: ExitCode.GAVE_OUT,
    FormatError: ExitCode.DOES_NOT_FIT,
    InputChanged: ExitCode.INPUT,
    InputRefused: ExitCode.INPUT,
    InputUnreadable: ExitCode.INPUT,
    JobInUse: ExitCode.ENVIRONMENT,
    JobMismatch: ExitCode.USAGE,
    JobNotFound: ExitCode.USAGE,
    JournalFailed: ExitCode.GAVE_OUT,
    MemoryGaveOut: ExitCode.GAVE_OUT,
    MissingExtra: ExitCode.ENVIRONMENT,
    ModelNotFound: ExitCode.MODEL,
    OtherVersion: ExitCode.ENVIRONMENT,
    OutOfBudget: ExitCode.DOES_NOT_FIT,
    OutputRefused: ExitCode.USAGE,
    PromptError: ExitCode.INPUT,
    SettingError: ExitCode.DOES_NOT_FIT,
    Stalled: ExitCode.STOPPED,
    StoreInUse: ExitCode.ENVIRONMENT,
    StreamBroken: ExitCode.GAVE_OUT,
    TokenizerError: ExitCode.MODEL,
    UnsupportedModel: ExitCode.MODEL,
}


def exit_code(error: Exception) -> ExitCode:
    """The code of an error that moedge raises on purpose; BUG for every other."""
    if is_out_of_memory(error):
        return ExitCode.GAVE_OUT
    return next((code for kind, code in OF_ERROR.items() if isinstance(error, kind)), ExitCode.BUG)
