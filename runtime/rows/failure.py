"""Why a row gets an error instead of an answer: one code per reason, what each does to the job, and the failure itself.

A `RowFailure` is the only form of it, from the line that was read to the line that is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any


class Severity(Enum):
    ROW = "the row becomes an error row"
    LINE = "a strict job is refused, a lenient one makes it an error row"
    FILE = "the job is refused, strict or lenient"


# What the message of a row that reached max_tokens within its JSON says to do.
CONTINUE_CUT = "continue it with moedge jobs resume JOB --cut --max-tokens N"


class ErrorCode(StrEnum):
    """Listed from the file inwards; docs/batches.md says when each one is given."""

    EMPTY_FILE = "empty_file"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    DAMAGED_GZIP = "damaged_gzip"
    DAMAGED_ZSTD = "damaged_zstd"
    INPUT_CHANGED = "input_changed"

    LINE_TOO_LONG = "line_too_long"
    INVALID_UTF8 = "invalid_utf8"
    INVALID_JSON_LINE = "invalid_json_line"
    TOO_DEEP = "too_deep"
    DUPLICATE_KEY = "duplicate_key"
    NON_FINITE_NUMBER = "non_finite_number"
    NUMBER_TOO_LONG = "number_too_long"
    LONE_SURROGATE = "lone_surrogate"
    NOT_A_ROW = "not_a_row"
    INVALID_ID = "invalid_id"
    DUPLICATE_ID = "duplicate_id"
    UNKNOWN_URL = "unknown_url"

    MISSING_PARAMETER = "missing_parameter"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    INVALID_JSON_SCHEMA = "invalid_json_schema"
    INVALID_GRAMMAR = "invalid_grammar"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CACHE_EXCEEDED = "kv_cache_exceeded"
    INCOMPLETE_OUTPUT = "incomplete_output"
    NUMERICAL_ERROR = "numerical_error"
    WORKER_CRASHED = "worker_crashed"

    @property
    def may_change(self) -> bool:
        """Whether a run of the same row on this or another machine may answer it."""
        return self in _MAY_CHANGE

    @property
    def severity(self) -> Severity:
        if self in _FILE:
            return Severity.FILE
        return Severity.ROW if self in _ROW else Severity.LINE


_FILE = {
    ErrorCode.EMPTY_FILE,
    ErrorCode.UNSUPPORTED_ENCODING,
    ErrorCode.DAMAGED_GZIP,
    ErrorCode.DAMAGED_ZSTD,
    ErrorCode.INPUT_CHANGED,
}
_ROW = {
    ErrorCode.MISSING_PARAMETER,
    ErrorCode.INVALID_TYPE,
    ErrorCode.INVALID_VALUE,
    ErrorCode.UNKNOWN_PARAMETER,
    ErrorCode.UNSUPPORTED_PARAMETER,
    ErrorCode.INVALID_JSON_SCHEMA,
    ErrorCode.INVALID_GRAMMAR,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.KV_CACHE_EXCEEDED,
    ErrorCode.INCOMPLETE_OUTPUT,
    ErrorCode.NUMERICAL_ERROR,
    ErrorCode.WORKER_CRASHED,
}
# Another run may have more memory for the KV cache; the model's context stays as it is.
_MAY_CHANGE = {ErrorCode.KV_CACHE_EXCEEDED, ErrorCode.NUMERICAL_ERROR, ErrorCode.WORKER_CRASHED}


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The error of one row, and its line and id.

    `param` is the field at fault, in the words of the row. `index` counts rows from 0, `line` counts the lines of the
    file from 1; line 0 is the whole file. `short` says in which form the error is answered; `own` are the fields of the
    user that the answer repeats. `partial` is the text that was generated until then, by choice.
    """

    code: ErrorCode
    message: str
    param: str | None = None
    index: int = 0
    line: int = 0
    id: str = ""
    short: bool = False
    own: Mapping[str, Any] = field(default_factory=dict, compare=False)
    partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "file"
        return f"{where}: {self.code}: {self.message}"


# Of all rows, that have the same error: from here on the job is refused.
MOST_ROWS = 0.5


def common_error(codes: Mapping[ErrorCode, int], num_rows: int) -> ErrorCode | None:
    """The error that most rows have, which is a slip of whoever wrote the file, and not of a row."""
    code, count = max(codes.items(), key=lambda item: item[1], default=(None, 0))
    return code if count > num_rows * MOST_ROWS else None


class InvalidRow(Exception):
    """Carries a failure from the field at fault to the reader, which knows the row. Never leaves this folder."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.failure = RowFailure(code, message, param)
