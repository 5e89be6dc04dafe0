"""A line of OpenAI's batch form: custom_id, method, url and the body of one call."""

from __future__ import annotations

from typing import Any

from .checks import shown
from .codes import ErrorCode, RowFault
from .fields import FREE_PREFIX, unknown
from .ids import row_id
from .rows import Endpoint

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
