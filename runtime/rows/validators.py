"""What one value of a row may be: each check returns the value that it accepts, in one type, or says what it wanted.

Knows no field by name and no row. What a chat message may be is in text/messages.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..sampling.params import Limit
from ..settings.errors import shown
from ..text.messages import BadMessage, MessageFault, joined, read_messages
from .failure import ErrorCode, InvalidRow
from .row import ChatPrompt, Message, TextPrompt, TokenPrompt

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


def wrong_type(value: Any, param: str, wanted: str) -> InvalidRow:
    return InvalidRow(ErrorCode.INVALID_TYPE, f"{param} must be {wanted}, found {shown(value)}", param)


def wrong_value(value: Any, param: str, wanted: str) -> InvalidRow:
    return InvalidRow(ErrorCode.INVALID_VALUE, f"{param} must be {wanted}, found {shown(value)}", param)


def _whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


# How a row's error calls each thing that can be wrong with a message.
_CODE_OF_MESSAGE = {
    MessageFault.TYPE: ErrorCode.INVALID_TYPE,
    MessageFault.VALUE: ErrorCode.INVALID_VALUE,
    MessageFault.MISSING: ErrorCode.MISSING_PARAMETER,
    MessageFault.UNKNOWN: ErrorCode.UNKNOWN_PARAMETER,
    MessageFault.UNSUPPORTED: ErrorCode.UNSUPPORTED_PARAMETER,
}


def messages(value: Any, param: str) -> ChatPrompt:
    """Text parts are joined by newlines, as vLLM joins them for templates that take strings."""
    try:
        read = read_messages(value, param)
    except BadMessage as error:
        raise InvalidRow(_CODE_OF_MESSAGE[error.fault], str(error), error.where) from None
    return ChatPrompt(tuple(Message(each["role"], joined(each["content"])) for each in read))


MAX_PROMPTS = 2048
_WANTED = "a string, a list of token ids, or a list of several of either kind"


def prompts(value: Any, param: str) -> tuple[TextPrompt | TokenPrompt, ...]:
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(several) > MAX_PROMPTS:
        raise wrong_value(several, param, f"at most {MAX_PROMPTS} prompts")
    read = tuple(_prompt(item, param) for item in several)
    if len({type(item) for item in read}) > 1:
        raise wrong_type(value, param, _WANTED)
    return read


def _prompt(value: Any, param: str) -> TextPrompt | TokenPrompt:
    if not isinstance(value, str | list):
        raise wrong_type(value, param, _WANTED)
    if not value:
        raise wrong_value(value, param, "not empty: there is nothing to continue")
    return TextPrompt(value) if isinstance(value, str) else TokenPrompt(token_ids(value, param))
