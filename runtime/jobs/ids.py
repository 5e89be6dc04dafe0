"""What names a row, and whether two rows share a name. Keeps digests, so that long names cost no memory."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from .checks import shown
from .codes import ErrorCode, RowFault

MAX_ID_CHARS = 512


def line_id(line: int) -> str:
    """The name of a row that has none of its own."""
    return f"line-{line}"


def row_id(value: Any, line: int, param: str) -> str:
    if value is None:
        return line_id(line)
    if not isinstance(value, str):
        raise RowFault(ErrorCode.INVALID_ID, f"{param} must be a string, found {shown(value)}", param)
    if not 1 <= len(value) <= MAX_ID_CHARS:
        raise RowFault(
            ErrorCode.INVALID_ID, f"{param} has {len(value)} characters, 1 to {MAX_ID_CHARS} are wanted", param
        )
    return value


class UniqueIds:
    """About 150 bytes per row: a 16-byte digest of the id and the line where it was first seen."""

    def __init__(self) -> None:
        self._first_line: dict[bytes, int] = {}

    def add(self, row_id: str, line: int, param: str) -> None:
        """Raises `RowFault` if an earlier line had this id."""
        digest = blake2b(row_id.encode(), digest_size=16).digest()
        first = self._first_line.setdefault(digest, line)
        if first != line:
            raise RowFault(
                ErrorCode.DUPLICATE_ID, f"the id {row_id[:64]!a} is taken by line {first}; make it unique", param
            )
