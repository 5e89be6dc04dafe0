"""Why a row gets an error instead of an answer: one code per reason, what each does to the job, and the failure itself.

A `RowFailure` is the only form of it, from the line that was read to the line that is written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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
    JSON_INCOMPLETE = "json_incomplete"
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
    ErrorCode.JSON_INCOMPLETE,
    ErrorCode.NUMERICAL_ERROR,
    ErrorCode.WORKER_CRASHED,
}
# The context length is also bounded by the memory that the KV cache gets.
_MAY_CHANGE = {ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.NUMERICAL_ERROR, ErrorCode.WORKER_CRASHED}


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The error of one row, and its line and id.

    `param` is the field at fault, in the words of the row. `index` counts rows from 0, `line` counts the lines of the
    file from 1; line 0 is the whole file. `short` says in which form the error is answered. `partial` is the text that
    was generated until then, by choice.
    """

    code: ErrorCode
    message: str
    param: str | None = None
    index: int = 0
    line: int = 0
    id: str = ""
    short: bool = False
    partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "file"
        return f"{where}: {self.code}: {self.message}"


# A job of fewer bad rows runs: their errors are soon read.
LEAST_COMMON = 20


@dataclass(frozen=True, slots=True)
class CommonFailure:
    """The most frequent reason of failures: how many rows have it, and the first of them."""

    count: int
    first: RowFailure

    def of_most(self, num_rows: int) -> bool:
        """Whether more than half of the rows fail for it, and enough of them to look like one mistake."""
        return self.count >= LEAST_COMMON and 2 * self.count > num_rows

    def sentence(self, num_rows: int) -> str:
        """What is wrong with the rows, and what to change."""
        rows = "the only row fails" if num_rows == 1 else f"{self.count:,} of {num_rows:,} rows fail"
        return f"{rows} with {self.first.code}: {self.first.message} (first: line {self.first.line})"


class CommonReasons:
    """Counts failures by reason: their code and the field at fault."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str | None]] = Counter()
        self._first: dict[tuple[str, str | None], RowFailure] = {}

    def add(self, failure: RowFailure) -> None:
        reason = failure.code, failure.param
        # A hostile file has as many reasons as rows: those that come late are not the commonest.
        if reason in self._first or len(self._first) < _MOST_REASONS:
            self._first.setdefault(reason, failure)
            self._counts[reason] += 1

    def commonest(self) -> CommonFailure | None:
        """None if no row failed."""
        found = self._counts.most_common(1)
        return CommonFailure(found[0][1], self._first[found[0][0]]) if found else None


_MOST_REASONS = 1000


class InvalidRow(Exception):
    """Carries a failure from the field at fault to the reader, which knows the row. Never leaves this folder."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.failure = RowFailure(code, message, param)
