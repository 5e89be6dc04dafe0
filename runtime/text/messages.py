"""Chat messages: what one may be, and what a chat template gets of it; functions that a row offers to the model, and
the calls of them in an answer's text. Knows no tokens, no template and no torch.

This is the only table of roles and the only check, for rows of a file and for messages that a Python caller gives.
Calls are read as Qwen's and Hermes' templates ask for them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ..settings.errors import PromptError, shown

# A closed set, because templates write the role between control tokens, unmarked. OpenAI renamed system to developer;
# templates know the old name only.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What a stored answer carries beside its text when it comes back as a message.
_IGNORED = {"annotations"}
_UNSUPPORTED = {"tool_calls", "tool_call_id", "function_call", "audio", "refusal", "reasoning", "reasoning_content"}
# Fields of a message that hold text, in the order in which `texts` gives them.
TEXT_FIELDS = ("reasoning_content", "content")

Message = Mapping[str, Any]
"""`role`: a key of `ROLES`, `content`: str or a list of `{"type": "text", "text": str}`, `name`: str, which only
messages of tools keep. An assistant's may have `reasoning_content` and `tool_calls`, a tool's `tool_call_id`."""


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
    return [read_message(item, f"{where}[{index}]") for index, item in enumerate(value)]


def texts(messages: Iterable[Message]) -> list[str]:
    """The texts of all messages, in order."""
    fields = (message[name] for message in messages for name in TEXT_FIELDS if name in message)
    return [text for field in fields for text in _content_texts(field)]


def with_texts(messages: Iterable[Message], replacements: Iterable[str]) -> list[dict[str, Any]]:
    """A copy of `messages` whose texts, in the order of `texts`, are `replacements`."""
    source = iter(replacements)
    copies = []
    for message in messages:
        copy = dict(message)
        for name in TEXT_FIELDS:
            if isinstance(field := message.get(name), list):
                copy[name] = [{**part, "text": next(source)} for part in field]
            elif field is not None:
                copy[name] = next(source)
        copies.append(copy)
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


def read_message(value: Any, where: str) -> dict[str, Any]:
    """One of `read_messages`."""
    if not isinstance(value, Mapping):
        raise _wrong_type(value, where, "an object with role and content")
    given = {key: item for key, item in value.items() if item is not None and key not in _IGNORED}
    role, name = given.pop("role", None), given.pop("name", None)
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(MessageFault.VALUE, role, f"{where}.role", f"one of {', '.join(ROLES)}")
    if name is not None and not isinstance(name, str):
        raise _wrong_type(name, f"{where}.name", "a string")
    read = _BESIDE[role](given, name, where) if role in _BESIDE else {}
    # An answer that calls functions need not say anything.
    content = given.pop("content", "" if "tool_calls" in read else None)
    read = {"role": ROLES[role], "content": read_content(content, f"{where}.content"), **read}
    if given:
        raise _unknown(next(iter(given)), where)
    return read


def _of_assistant(given: dict[str, Any], name: str | None, where: str) -> dict[str, Any]:
    """Takes what only an assistant's message may have; vLLM's older name of the reasoning is accepted too."""
    read: dict[str, Any] = {}
    for key in ("reasoning", "reasoning_content"):
        if (value := given.pop(key, None)) is not None:
            read["reasoning_content"] = _string(value, f"{where}.{key}")
    if calls := given.pop("tool_calls", None):
        read["tool_calls"] = read_calls(calls, f"{where}.tool_calls")
    return read


def _of_tool(given: dict[str, Any], name: str | None, where: str) -> dict[str, Any]:
    read = {} if name is None else {"name": name}
    if (call_id := given.pop("tool_call_id", None)) is not None:
        read["tool_call_id"] = _string(call_id, f"{where}.tool_call_id")
    return read


_BESIDE = {"assistant": _of_assistant, "tool": _of_tool}


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong_type(value, where, "a string")
    return value


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Calls of functions as templates take them: `arguments` is an object, where OpenAI has it as JSON text."""
    if not isinstance(value, list | tuple):
        raise _wrong_type(value, where, "a list of tool calls")
    return [_call(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _call(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise _wrong_type(value, where, 'an object {"type": "function", "function": {"name": ..., "arguments": ...}}')
    name = _string(function.get("name"), f"{where}.function.name")
    call = {"type": "function", "function": {"name": name, "arguments": _arguments(function.get("arguments"), where)}}
    if value.get("id") is not None:
        call["id"] = _string(value["id"], f"{where}.id")
    return call


def _arguments(value: Any, where: str) -> dict[str, Any]:
    """A copy of the object, or what its JSON text says."""
    try:
        # Through JSON even where it is an object: a Python caller's may hold anything.
        read = json.loads(
            value if isinstance(value, str) else json.dumps(value, allow_nan=False), parse_constant=_never
        )
    except (TypeError, ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise _wrong(MessageFault.VALUE, value, f"{where}.function.arguments", "a JSON object, or the text of one")
    return read


def _never(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def read_content(value: Any, where: str) -> str | list[dict[str, str]]:
    """A text or its parts. Raises BadMessage."""
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


MAX_TOOLS = 128
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_KNOWN = {"name", "description", "parameters", "strict"}


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """`arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


_BEGIN, _END = "<tool_call>", "</tool_call>"


def read_tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """A copy of a list of function tools as OpenAI has them. Raises BadMessage."""
    if not isinstance(value, list | tuple):
        raise _wrong(MessageFault.TYPE, value, where, "a list of function tools")
    if len(value) > MAX_TOOLS:
        raise BadMessage(MessageFault.VALUE, f"{where} has {len(value)} tools, at most {MAX_TOOLS} are accepted", where)
    return tuple(_tool(item, f"{where}[{index}]") for index, item in enumerate(value))


def _tool(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("function"), Mapping):
        raise _wrong(MessageFault.TYPE, value, where, 'an object {"type": "function", "function": {"name": ...}}')
    if value.get("type") != "function":
        kind = shown(value.get("type"))
        raise BadMessage(
            MessageFault.UNSUPPORTED, f"{where}: tools of type {kind} are not supported, only function", where
        )
    function = value["function"]
    for key in (*value, *function):
        if key not in _KNOWN | {"type", "function"}:
            raise BadMessage(MessageFault.UNKNOWN, f"{key[:64]!a} of {where} is not a known field; remove it", where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "1 to 64 letters, digits, dots, dashes and underscores"
        raise _wrong(MessageFault.VALUE, name, f"{where}.function.name", wanted)
    if not isinstance(function.get("description", ""), str | None):
        raise _wrong(MessageFault.TYPE, function["description"], f"{where}.function.description", "a string")
    if not isinstance(parameters, dict | None):
        raise _wrong(MessageFault.TYPE, parameters, f"{where}.function.parameters", "a JSON schema, an object")
    given = {key: item for key, item in function.items() if item is not None}
    return {"type": "function", "function": copy.deepcopy(given)}


def split_calls(text: str) -> tuple[str, list[FunctionCall]]:
    """(the text before the first call, the calls); the whole text and none where a call is not what it should be."""
    begin = text.find(_BEGIN)
    if begin < 0:
        return text, []
    calls, at = [], begin
    while (at := text.find(_BEGIN, at)) >= 0:
        at += len(_BEGIN)
        end = text.find(_END, at)
        # The end mark of the last call is an end of the answer for some models.
        call = _written_call(text[at:] if end < 0 else text[at:end])
        if call is None:
            return text, []
        calls.append(call)
        if end < 0:
            break
        at = end + len(_END)
    return text[:begin].strip(), calls


def _written_call(text: str) -> FunctionCall | None:
    try:
        call = json.loads(text, parse_constant=_never)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return FunctionCall(call["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return FunctionCall(call["name"], json.dumps(arguments, ensure_ascii=False))
