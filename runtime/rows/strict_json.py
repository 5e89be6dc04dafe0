"""One line of bytes to one JSON object, without what Python's parser lets pass.

Refuses duplicate keys, NaN and infinities (1e999 too), numbers of hundreds of digits, deep nesting and lone
surrogates. Knows nothing of rows. RFC 8259; RFC 7493 (I-JSON) for names and surrogates.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate
from math import isinf
from typing import Any, Never

from .failure import ErrorCode, InvalidRow

MAX_DEPTH = 64
# The largest double has 309 digits; int() itself may be configured to refuse anything above 640.
MAX_NUMBER_CHARS = 400

_NESTING = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_NOT_BRACKETS = bytes(set(range(256)) - set(_NESTING))
_STRING = re.compile(rb'"[^"]*"?')
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(line: bytes) -> dict[str, Any]:
    """Raises `InvalidRow` for anything but one JSON object."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRow(
            ErrorCode.INVALID_UTF8, f"byte {error.start + 1} is not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from None
    _check_depth(line)
    value = _decode(text)
    if not isinstance(value, dict):
        raise InvalidRow(ErrorCode.INVALID_JSON_LINE, f"expected a JSON object, found a bare {text.lstrip()[:20]!a}")
    if b"\\u" in line and _SURROGATE_ESCAPE.search(line):
        _check_surrogates(value)
    return value


def parse_again(line: bytes) -> dict[str, Any]:
    """Parses again a line that `parse_object` has accepted, without its checks."""
    value: dict[str, Any] = json.loads(line.decode("utf-8"))
    return value


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        # One of its messages ends in "at" itself.
        message = error.msg.removesuffix(" at")
        raise InvalidRow(ErrorCode.INVALID_JSON_LINE, f"{message} at column {error.colno}") from None


def _check_depth(line: bytes) -> None:
    """Before parsing, because the parser recurses: its limit would depend on the caller's stack."""
    if line.count(b"{") + line.count(b"[") <= MAX_DEPTH:
        return
    unescaped = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _STRING.sub(b"", unescaped).translate(None, _NOT_BRACKETS)
    if any(depth > MAX_DEPTH for depth in accumulate(map(_NESTING.__getitem__, brackets))):
        raise InvalidRow(ErrorCode.TOO_DEEP, f"nested deeper than {MAX_DEPTH} levels")


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRow(
            ErrorCode.LONE_SURROGATE,
            f"\\u{ord(error.object[error.start]):04x} is a lone surrogate; write the whole pair or the character",
        ) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) == len(pairs):
        return unique
    key, times = Counter(key for key, _ in pairs).most_common(1)[0]
    raise InvalidRow(ErrorCode.DUPLICATE_KEY, f"the key {key[:64]!a} is given {times} times; keep one of them")


def _finite(literal: str) -> float:
    _check_length(literal)
    value = float(literal)
    if isinf(value):
        raise InvalidRow(ErrorCode.NON_FINITE_NUMBER, f"{literal[:32]} is too large for a 64-bit float")
    return value


def _integer(literal: str) -> int:
    _check_length(literal)
    return int(literal)


def _check_length(literal: str) -> None:
    if len(literal) > MAX_NUMBER_CHARS:
        raise InvalidRow(
            ErrorCode.NUMBER_TOO_LONG,
            f"a number of {len(literal)} characters, at most {MAX_NUMBER_CHARS} are read",
        )


def _refuse_constant(literal: str) -> Never:
    raise InvalidRow(ErrorCode.NON_FINITE_NUMBER, f"{literal} is not JSON; leave the field out or give a number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_float=_finite, parse_int=_integer, parse_constant=_refuse_constant
)
