"""A line of the short form: an optional id, `prompt` or `messages`, and sampling fields, all on one level."""

from __future__ import annotations

from typing import Any

from .codes import ErrorCode, RowFault
from .ids import row_id


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
