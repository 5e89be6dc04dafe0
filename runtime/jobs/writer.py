"""Finished rows in any order to files in input order, which appear when the job ends. Knows no JSON."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from .new_file import NewFile
from .outputs import OutputPaths


class OrderedWriter:
    """Holds only the rows that are finished before an earlier one; leaving `with` early discards everything."""

    def __init__(self, paths: OutputPaths) -> None:
        self._paths = paths
        self._answered = NewFile(paths.out)
        self._failed = NewFile(paths.errors)
        self._failed_rows: set[int] = set()
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._next_row = 0

    def add(self, index: int, line: str, failed: bool = False) -> None:
        """`index` counts rows from 0; `line` is ASCII without a line end."""
        if index < self._next_row or index in self._held:
            raise ValueError(f"row {index} was written before; a row has one answer")
        self._held[index] = (line.encode("ascii") + b"\n", failed)
        while self._next_row in self._held:
            self._append(self._next_row, *self._held.pop(self._next_row))
            self._next_row += 1

    def finish(self, num_rows: int) -> None:
        """Publishes OUT, and the error file if a row failed. Raises `OutputExists` if OUT has appeared meanwhile."""
        if self._next_row != num_rows or self._held:
            raise ValueError(f"{num_rows} rows are to be written, {self._next_row + len(self._held)} were finished")
        self._paths.refuse_existing()
        if self._failed_rows:
            self._failed.publish()
        # OUT last: whoever sees it can rely on the errors being there too.
        self._answered.publish()
        self._paths.partial.unlink(missing_ok=True)
        self.discard()

    def finish_partial(self) -> None:
        """Publishes every finished row, answered or failed, also those behind a gap, in the partial file."""
        partial = NewFile(self._paths.partial)
        answered, failed = self._answered.lines(), self._failed.lines()
        for row in range(self._next_row):
            partial.write(next(failed if row in self._failed_rows else answered))
        for row in sorted(self._held):
            partial.write(self._held[row][0])
        partial.publish()
        self.discard()

    def discard(self) -> None:
        """Removes what was not published."""
        self._answered.discard()
        self._failed.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _append(self, row: int, data: bytes, failed: bool) -> None:
        if failed:
            self._failed_rows.add(row)
        (self._failed if failed else self._answered).write(data)
