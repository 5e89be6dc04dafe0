"""Chat messages: what one may be, and what a chat template gets of it. Knows no tokens, no template and no torch.

This is the only table of roles and the only check, for rows of a file and for messages that a Python caller gives.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any

from ..settings.errors import PromptError, shown

# A closed set, because templates write the role between control tokens, unmarked. OpenAI renamed system to developer;
# templates know the old name only.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What a stored answer carries beside its text when it comes back as a message.
_IGNORED = {"annotations"}
_UNSUPPORTED = {"tool_calls", "tool_call_id", "function_call", "audio", "refusal", "reasoning", "reasoning_content"}

Message = Mapping[str, Any]
"""`role`: a key of `ROLES`, `content`: str or a list of `{"type": "text", "text": str}`, `name`: str, not rendered."""


class MessageFault(Enum):
    """The kinds of what can be wrong with a message."""

    TYPE = auto()
    VALUE = auto()
    MISSING = auto()
    UNKNOWN = auto()
    UNSUPPORTED = auto()


class BadMessage(PromptError):
    """`where` is the field at fault, such as `messages[0].role`."""

    def __init__(self, fault: MessageFault, message: str, where: str) -> None:
        super().__init__(message)
        self.fault = fault
        self.where = where


def read_messages(value: Any, where: str = "messages") -> list[dict[str, Any]]:
    """A deep copy of `value` with nothing but roles, as templates know them, and contents. Raises BadMessage."""
    if not isinstance(value, list | tuple):
        raise _wrong_type(value, where, "a list of messages")
    if not value:
        raise _wrong(MessageFault.VALUE, value, where, "at least one message")
    return [_message(item, f"{where}[{index}]") for index, item in enumerate(value)]


def texts(messages: Iterable[Message]) -> list[str]:
    """The texts of all contents, in order."""
    return [text for message in messages for text in _content_texts(message["content"])]


def with_texts(messages: Iterable[Message], replacements: Iterable[str]) -> list[dict[str, Any]]:
    """A copy of `messages` whose texts, in the order of `texts`, are `replacements`."""
    source = iter(replacements)
    copies = []
    for message in messages:
        content = message["content"]
        content = [{**part, "text": next(source)} for part in content] if isinstance(content, list) else next(source)
        copies.append({**message, "content": content})
    return copies


def joined(content: str | Iterable[Mapping[str, str]]) -> str:
    """The text of a content, a line per part."""
    return "\n".join(_content_texts(content))


def joined_parts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """A copy of `messages` in which every content is one text."""
    return [{**message, "content": joined(message["content"])} for message in messages]


def has_parts(messages: Iterable[Message]) -> bool:
    return any(isinstance(message["content"], list) for message in messages)


def _content_texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(value, where, "an object with role and content")
    given = {key: item for key, item in value.items() if item is not None and key not in _IGNORED}
    role, name = given.pop("role", None), given.pop("name", None)
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(MessageFault.VALUE, role, f"{where}.role", f"one of {', '.join(ROLES)}")
    if name is not None and not isinstance(name, str):
        raise _wrong_type(name, f"{where}.name", "a string")
    content = _content(given.pop("content", None), f"{where}.content")
    if given:
        raise _unknown(next(iter(given)), where)
    return {"role": ROLES[role], "content": content}


def _content(value: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if value is None:
        raise BadMessage(MessageFault.MISSING, f"{where} is missing", where)
    if not isinstance(value, list) or not value:
        raise _wrong_type(value, where, "a string or a list of text parts")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(value)]


def _part(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong_type(value, where, 'an object {"type": "text", "text": ...}')
    if value.get("type") != "text":
        message = f"{where}: parts of type {shown(value.get('type'))} are not supported, only text"
        raise BadMessage(MessageFault.UNSUPPORTED, message, where)
    if set(value) != {"type", "text"} or not isinstance(value["text"], str):
        raise _wrong_type(value.get("text"), f"{where}.text", "a string, and nothing beside type and text")
    return {"type": "text", "text": value["text"]}


def _unknown(key: str, where: str) -> BadMessage:
    known = key in _UNSUPPORTED
    fault = MessageFault.UNSUPPORTED if known else MessageFault.UNKNOWN
    message = f"{key[:64]!a} of {where} is not {'supported' if known else 'a known field'}; remove it"
    return BadMessage(fault, message, f"{where}.{key[:64]}")


def _wrong_type(value: Any, where: str, wanted: str) -> BadMessage:
    return _wrong(MessageFault.TYPE, value, where, wanted)


def _wrong(fault: MessageFault, value: Any, where: str, wanted: str) -> BadMessage:
    return BadMessage(fault, f"{where} must be {wanted}, found {shown(value)}", where)
