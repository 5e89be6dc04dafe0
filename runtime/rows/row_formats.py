"""How a line says a row: OpenAI's batch form, the short form, and what names a row in either."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from .error_codes import ErrorCode, RowFault
from .fields import FREE_PREFIX, unknown
from .row import Endpoint
from .validators import shown

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


LINE_KEYS = ("custom_id", "method", "url", "body")
_ANY_OF_THEM = frozenset(LINE_KEYS)
_ENDPOINTS = {endpoint.value: endpoint for endpoint in (Endpoint.CHAT, Endpoint.COMPLETION)}


def is_openai(line: dict[str, Any]) -> bool:
    return not _ANY_OF_THEM.isdisjoint(line)


def openai_id(line: dict[str, Any], number: int) -> str:
    return row_id(line.get("custom_id"), number, "custom_id")


def openai_body(line: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or not isinstance(body, dict):
        raise RowFault(
            ErrorCode.NOT_A_ROW, "a batch line has custom_id, method, url (a string) and body (an object); add them"
        )
    if line.get("method") != "POST":
        raise RowFault(ErrorCode.NOT_A_ROW, f'method must be "POST", found {shown(line.get("method"))}', "method")
    if url not in _ENDPOINTS:
        raise RowFault(ErrorCode.UNKNOWN_URL, f"url {shown(url)} is not one of {', '.join(_ENDPOINTS)}", "url")
    for key in line:
        if key not in LINE_KEYS and not key.startswith(FREE_PREFIX):
            raise unknown(key, LINE_KEYS)
    return _ENDPOINTS[url], body


def is_short(line: dict[str, Any]) -> bool:
    return "prompt" in line or "messages" in line


def short_id(line: dict[str, Any], number: int) -> str:
    """Whole numbers are names too; the answer gives them back as strings."""
    value = line.get("id")
    return row_id(str(value) if type(value) is int else value, number, "id")


def short_body(line: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in line.items() if name != "id"}
    if body.get("prompt") is not None and body.get("messages") is not None:
        raise RowFault(ErrorCode.INVALID_VALUE, "prompt and messages are both given; keep one of them", "messages")
    if isinstance(body.get("prompt"), list) and not all(type(item) is int for item in body["prompt"]):
        raise RowFault(
            ErrorCode.INVALID_TYPE, "prompt of a short row must be one string or one list of token ids", "prompt"
        )
    return body
