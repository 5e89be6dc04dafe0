"""Functions that a row offers to the model, and the calls of them in an answer's text. Knows no tokens and no torch.

Calls are read as Qwen's and Hermes' templates ask for them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..settings.errors import shown
from .messages import BadMessage, MessageFault

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


def _wrong(fault: MessageFault, value: Any, where: str, wanted: str) -> BadMessage:
    return BadMessage(fault, f"{where} must be {wanted}, found {shown(value)}", where)


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
        call = _call(text[at:] if end < 0 else text[at:end])
        if call is None:
            return text, []
        calls.append(call)
        if end < 0:
            break
        at = end + len(_END)
    return text[:begin].strip(), calls


def _call(text: str) -> FunctionCall | None:
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


def _never(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
