"""What one value of a row may be: each check returns the value it accepts, in one type, or says what it wanted.

Knows no field by name and no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..sampling.params import Limit
from .error_codes import ErrorCode, RowFault

MAX_STOP = 16
MAX_TOKEN_ID = (1 << 31) - 1


class Check(Protocol):
    def __call__(self, value: Any, param: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Number:
    limit: Limit

    def __call__(self, value: Any, param: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(value, param, "a number")
        if value not in self.limit:
            raise wrong_value(value, param, str(self.limit))
        return float(value)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number; 3.0 is one too, because tables of numbers are often written so."""

    limit: Limit

    def __call__(self, value: Any, param: str) -> int:
        if isinstance(value, bool) or not (isinstance(value, int) or _whole(value)):
            raise wrong_type(value, param, "a whole number")
        if value not in self.limit:
            raise wrong_value(value, param, str(self.limit))
        return int(value)


def flag(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(value, param, "true or false")
    return value


def text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, param, "a string")
    return value


def stop_strings(value: Any, param: str) -> tuple[str, ...]:
    """One string or a list of up to 16; an empty one would end every answer before it starts."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) for item in strings):
        raise wrong_type(value, param, "a string or a list of strings")
    if len(strings) > MAX_STOP or "" in strings:
        raise wrong_value(value, param, f"at most {MAX_STOP} strings, none of them empty")
    return tuple(strings)


def token_ids(value: Any, param: str) -> tuple[int, ...]:
    """Whole numbers from 0; which of them the vocabulary has is not known here."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise wrong_type(value, param, "a list of token ids")
    if value and not (min(value) >= 0 and max(value) <= MAX_TOKEN_ID):
        raise wrong_value(value, param, f"token ids from 0 to {MAX_TOKEN_ID}")
    return tuple(value)


def wrong_type(value: Any, param: str, wanted: str) -> RowFault:
    return RowFault(ErrorCode.INVALID_TYPE, f"{param} must be {wanted}, found {shown(value)}", param)


def wrong_value(value: Any, param: str, wanted: str) -> RowFault:
    return RowFault(ErrorCode.INVALID_VALUE, f"{param} must be {wanted}, found {shown(value)}", param)


def shown(value: Any) -> str:
    """A value in a message: short, on one line, and printable whatever it holds."""
    if isinstance(value, list | tuple | dict):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return ascii(value[:60] if isinstance(value, str) else value)[:64]


def _whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
