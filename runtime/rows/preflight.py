"""The whole input read once before anything is loaded: what it holds, and whether the job may start."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from io import BufferedReader

from ..settings.errors import counted
from .failure import CommonFailure, CommonReasons, ErrorCode, RowFailure, Severity
from .input_file import Fingerprint, HashingReader, open_regular
from .reader import RowIndex, rows_from
from .row import Defaults, Endpoint, Row

MAX_LISTED = 20
# Read at once; each time costs two calls of Python.
_BUFFER_NBYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Problems:
    """How many rows have errors of one severity, and the first of them."""

    total: int
    first: tuple[RowFailure, ...]

    def lines(self) -> Iterator[str]:
        yield from map(str, self.first)
        if self.total > len(self.first):
            yield f"... and {self.total - len(self.first)} more"


@dataclass(frozen=True, slots=True)
class Preflight:
    """`rows` counts runnable rows by endpoint (chat, completion, short); the three kinds of problems are apart
    because they decide differently: whole files, malformed lines, rows that merely get an error for an answer.
    `bad_rows` are the indices of all rows with an error; `index` is where each row is, without its gzip layer.
    """

    path: str
    fingerprint: Fingerprint
    rows: Mapping[str, int]
    file_problems: Problems
    line_problems: Problems
    row_problems: Problems
    bad_rows: Items[int] = ()
    commonest: CommonFailure | None = None
    index: RowIndex = field(default_factory=RowIndex)

    @property
    def num_rows(self) -> int:
        """Input rows, and so output rows of a lenient job."""
        return sum(self.rows.values()) + self.line_problems.total + self.row_problems.total

    def refused(self, lenient: bool = False) -> bool:
        """Whether the job must not start (exit code 7)."""
        return (
            self.file_problems.total > 0
            or (not lenient and self.line_problems.total > 0)
            or self.hopeless(lenient) is not None
        )

    def hopeless(self, lenient: bool = False) -> str | None:
        """Why a job of these rows is not worth a model, in a sentence: no row can run, or most fail for one reason."""
        most = self.commonest
        if most is None or not (len(self.bad_rows) == self.num_rows or (not lenient and most.of_most(self.num_rows))):
            return None
        return f"Nothing was run: {most.sentence(self.num_rows)}"

    def report(self, lenient: bool = False) -> str:
        """A report for the user: the counts, then the errors that refuse the input, then the others."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.rows.items() if count) or "none runnable"
        text = [f"{self.path}: {counted(self.num_rows, 'row')} ({kinds})"]
        for problems in (self.file_problems, self.line_problems, self.row_problems):
            text.extend(problems.lines())
        if not self.refused(lenient) or self.file_problems.total:
            return "\n".join(text)
        hopeless = self.hopeless(lenient)
        text.append(hopeless or "Nothing was run. Fix these lines, or pass --lenient to write them as error rows")
        return "\n".join(text)


def preflight(path: str | os.PathLike[str], defaults: Defaults, max_listed: int = MAX_LISTED) -> Preflight:
    """Memory is one line and about 180 bytes per row, most of it for the ids. Raises `InputUnreadable`."""
    tally = _Tally(max_listed)
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
    def __init__(self, max_listed: int) -> None:
        self.num_rows = 0
        self.index = RowIndex()
        self._max_listed = max_listed
        self._bad_rows = array("Q")
        self._rows: Counter[Endpoint] = Counter()
        self._codes: Counter[ErrorCode] = Counter()
        self._first: dict[Severity, list[RowFailure]] = {severity: [] for severity in Severity}
        self._reasons = CommonReasons()

    def add(self, row: Row | RowFailure) -> None:
        self.num_rows += 1
        if isinstance(row, RowFailure):
            self._note(row)
            self._reasons.add(row)
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
            commonest=self._reasons.commonest(),
            index=self.index,
        )

    def _note(self, failure: RowFailure) -> None:
        self._codes[failure.code] += 1
        listed = self._first[failure.code.severity]
        if len(listed) < self._max_listed:
            listed.append(failure)

    def _problems(self, severity: Severity) -> Problems:
        total = sum(count for code, count in self._codes.items() if code.severity is severity)
        return Problems(total, tuple(self._first[severity]))
