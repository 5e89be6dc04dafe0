"""Why a row gets an error instead of an answer: one code per reason, and what each does to the job."""

from __future__ import annotations

from enum import Enum, StrEnum


class Severity(Enum):
    ROW = "the row becomes an error row"
    LINE = "a strict job is refused, a lenient one makes it an error row"
    FILE = "the job is refused, strict or lenient"


class ErrorCode(StrEnum):
    """Listed from the file inwards; docs/rows.md says when each one is given."""

    EMPTY_FILE = "empty_file"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    DAMAGED_GZIP = "damaged_gzip"
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
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    NUMERICAL_ERROR = "numerical_error"
    WORKER_CRASHED = "worker_crashed"

    @property
    def severity(self) -> Severity:
        if self in _FILE:
            return Severity.FILE
        return Severity.ROW if self in _ROW else Severity.LINE


_FILE = {
    ErrorCode.EMPTY_FILE,
    ErrorCode.UNSUPPORTED_ENCODING,
    ErrorCode.DAMAGED_GZIP,
    ErrorCode.INPUT_CHANGED,
}
_ROW = {
    ErrorCode.MISSING_PARAMETER,
    ErrorCode.INVALID_TYPE,
    ErrorCode.INVALID_VALUE,
    ErrorCode.UNKNOWN_PARAMETER,
    ErrorCode.UNSUPPORTED_PARAMETER,
    ErrorCode.INVALID_JSON_SCHEMA,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.NUMERICAL_ERROR,
    ErrorCode.WORKER_CRASHED,
}


class RowFault(Exception):
    """What is wrong with the row being read; the reader adds the line and turns it into a `RowError`."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
