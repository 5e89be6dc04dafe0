"""The whole input read once before anything is loaded: what it holds, and whether the job may start."""

import os
from array import array
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from io import BufferedReader

from ..settings.errors import InputRefused, counted
from .reader import Fingerprint, HashingReader, RowIndex, open_regular, rows_from
from .row import Defaults, Endpoint, ErrorCode, Row, RowFailure, Severity, common_error

MAX_LISTED = 20
_FEW = 3
# Read at once; each time costs two calls of Python.
_BUFFER_NBYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Problems:
    """How many rows have errors of one severity, and the first of them."""

    total: int
    first: tuple[RowFailure, ...]


def located(failure: RowFailure, unit: str) -> str:
    """The failure behind the number of its line, or of its row where the file is a table."""
    text = str(failure)
    return text.replace("line", unit, 1) if failure.line else text


@dataclass(frozen=True, slots=True)
class Preflight:
    """`rows` counts runnable rows by endpoint (chat, completion, short); the three kinds of problems are apart
    because they decide differently: whole files, malformed lines, rows that merely get an error for an answer.
    `bad_rows` are the indices of all rows with an error; `index` is where each row is, without its gzip layer. `codes`
    counts the errors; `unit` is what the numbers of errors count in the user's file: lines, or rows of a table.
    """

    path: str
    fingerprint: Fingerprint
    rows: Mapping[str, int]
    file_problems: Problems
    line_problems: Problems
    row_problems: Problems
    bad_rows: Items[int] = ()
    index: RowIndex = field(default_factory=RowIndex)
    codes: Mapping[ErrorCode, int] = field(default_factory=dict)
    unit: str = "line"

    @property
    def num_rows(self) -> int:
        """Input rows, and so output rows of a lenient job."""
        return sum(self.rows.values()) + self.line_problems.total + self.row_problems.total

    def refused(self, lenient: bool = False) -> bool:
        """Whether the job must not start (exit code 7)."""
        if self.file_problems.total:
            return True
        return not lenient and (self.line_problems.total > 0 or self.common_error is not None)

    @property
    def common_error(self) -> ErrorCode | None:
        """The error that most rows have."""
        return common_error(self.codes, self.num_rows)

    def refusal(self, lenient: bool) -> InputRefused:
        """What a job is refused with."""
        total = self.line_problems.total + self.row_problems.total
        return InputRefused(self.report(lenient), self._listed(lenient) if total else (), total)

    def report(self, lenient: bool = False) -> str:
        """A report for the user: the counts, then the errors that refuse the input, then the others."""
        if any(failure.code is ErrorCode.EMPTY_FILE for failure in self.file_problems.first):
            return f"{self.path} contains no rows"
        text = [f"{self.path}: {counted(self.num_rows, 'row')}: {self._counts()}"]
        text += [located(failure, self.unit) for failure in self.file_problems.first]
        marked = not lenient and self.line_problems.total > 0
        listed = self._listed(lenient)
        for failure in listed:
            stops = failure.code.severity is Severity.LINE
            mark = f" ({'stops the job' if stops else 'this row only'})" if marked and self.row_problems.total else ""
            text.append(located(failure, self.unit) + mark)
        if more := self.line_problems.total + self.row_problems.total - len(listed):
            text.append(f"... and {more:,} more")
        if self.refused(lenient) and not self.file_problems.total:
            text.append(self._advice())
        return "\n".join(text)

    def _listed(self, lenient: bool) -> list[RowFailure]:
        """The first errors; of one that most rows have, a few are enough."""
        found = sorted((*self.line_problems.first, *self.row_problems.first), key=lambda each: each.line)
        common = None if lenient or self.line_problems.total else self.common_error
        same = [each for each in found if each.code == common]
        return [each for each in found if each.code != common or each in same[:_FEW]]

    def _counts(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.rows.items() if count)
        invalid = self.num_rows - sum(self.rows.values())
        if not invalid:
            return f"all valid ({kinds})" if kinds else "nothing to run"
        return f"{sum(self.rows.values()):,} valid{f' ({kinds})' if kinds else ''}, {invalid:,} invalid"

    def _advice(self) -> str:
        if self.line_problems.total:
            return "Nothing was run. Fix these lines, or pass --lenient to write them as error rows"
        code = self.common_error
        return (
            f"Nothing was run: {self.codes[code] if code else 0:,} of {counted(self.num_rows, 'row')} have the error "
            f"{code}. Fix the rows, or pass --lenient to answer the others"
        )


def preflight(path: str | os.PathLike[str], defaults: Defaults) -> Preflight:
    """Memory is one line and about 180 bytes per row, most of it for the ids. Raises `InputUnreadable`."""
    tally = _Tally()
    with open_regular(path) as file:
        hashing = HashingReader(file)
        for row in rows_from(BufferedReader(hashing, _BUFFER_NBYTES), defaults, index=tally.index):
            tally.add(row)
        fingerprint = hashing.fingerprint()
        if hashing.changed():
            tally.refuse(
                ErrorCode.INPUT_CHANGED,
                "the file was changed while it was read; run the command again",
            )
    if not tally.num_rows:
        tally.refuse(ErrorCode.EMPTY_FILE, "the input contains no rows")
    return tally.preflight(os.fspath(path), fingerprint)


def file_fingerprint(path: str | os.PathLike[str]) -> Fingerprint:
    """The fingerprint of a whole file, for callers that do not read its rows."""
    with open_regular(path) as file:
        return HashingReader(file).fingerprint()


class _Tally:
    def __init__(self) -> None:
        self.num_rows = 0
        self.index = RowIndex()
        self._bad_rows = array("Q")
        self._rows: Counter[Endpoint] = Counter()
        self._codes: Counter[ErrorCode] = Counter()
        self._first: dict[Severity, list[RowFailure]] = {severity: [] for severity in Severity}

    def add(self, row: Row | RowFailure) -> None:
        self.num_rows += 1
        if isinstance(row, RowFailure):
            self._note(row)
            self._bad_rows.append(row.index)
        else:
            self._rows[row.endpoint] += 1

    def refuse(self, code: ErrorCode, message: str) -> None:
        self._note(RowFailure(code, message))

    def preflight(self, path: str, fingerprint: Fingerprint) -> Preflight:
        return Preflight(
            path=path,
            fingerprint=fingerprint,
            rows={endpoint.name.lower(): count for endpoint, count in self._rows.items()},
            file_problems=self._problems(Severity.FILE),
            line_problems=self._problems(Severity.LINE),
            row_problems=self._problems(Severity.ROW),
            bad_rows=self._bad_rows,
            index=self.index,
            codes=self._codes,
        )

    def _note(self, failure: RowFailure) -> None:
        self._codes[failure.code] += 1
        listed = self._first[failure.code.severity]
        if len(listed) < MAX_LISTED:
            listed.append(failure)

    def _problems(self, severity: Severity) -> Problems:
        total = sum(count for code, count in self._codes.items() if code.severity is severity)
        return Problems(total, tuple(self._first[severity]))
