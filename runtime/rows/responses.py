"""A request of OpenAI's Responses API as the fields of a chat that asks for the same, checked as those of a chat are.

What a server would have to keep from one request to the next, tools that it would have to run, and what is no text are
refused: there is one way through the engine, that of chats.
"""

import json
from collections.abc import Mapping
from typing import Any

from ..sampling.params import LIMITS
from ..settings.errors import shown
from ..text.messages import joined, read_content, read_message
from .fields import (
    FIELDS,
    FREE_PREFIX,
    IGNORED,
    Check,
    NamedTool,
    as_row_error,
    changes_nothing,
    not_supported,
    only,
    reasoning_effort,
    response_format,
    text,
    tool_choice,
    tools,
    unknown,
    whole,
    wrong_type,
    wrong_value,
)
from .row import ChatPrompt, Endpoint, ErrorCode, InvalidRow, parse_object

# The parts of a message that are text, and what those of a stored answer have beside it.
_TEXT_PARTS = ("input_text", "output_text")
_BESIDE_TEXT = ("annotations", "logprobs")
# What items of a stored answer have beside their content.
_OF_ITEMS = ("type", "id", "status")
_LOGPROBS = "message.output_text.logprobs"


def input_items(value: Any, param: str) -> ChatPrompt:
    """A text, or a list of messages, calls of functions, their outputs, and reasoning."""
    if isinstance(value, str):
        return ChatPrompt(({"role": "user", "content": value},))
    if not isinstance(value, list) or not value:
        raise wrong_type(value, param, "a string or a list of items, not empty")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        _add(messages, _message(item, f"{param}[{index}]"))
    if not messages:
        raise InvalidRow(ErrorCode.MISSING_PARAMETER, f"{param} has no message", param)
    return ChatPrompt(tuple(messages))


def _add(messages: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """The items of one answer, which are reasoning, a message and calls in this order, are one message of a chat."""
    last = messages[-1] if messages else {"role": ""}
    if new["role"] != "assistant" or last["role"] != "assistant" or "reasoning_content" in new:
        messages.append(new)
    elif "tool_calls" in new:
        last["tool_calls"] = last.get("tool_calls", []) + new["tool_calls"]
    elif "reasoning_content" in last and not last["content"] and "tool_calls" not in last:
        last["content"] = new["content"]
    else:
        messages.append(new)


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise wrong_type(item, where, "an object")
    given = {name: value for name, value in item.items() if value is not None}
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        message = f"{where}: items of type {shown(kind)} are not supported, only {', '.join(_ITEMS)}"
        raise InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, message, f"{where}.type")
    return _ITEMS[kind](given, where)


def _said(given: dict[str, Any], where: str) -> dict[str, Any]:
    fields = {name: value for name, value in given.items() if name not in _OF_ITEMS}
    message = as_row_error(read_message, fields | {"content": _parts(given.get("content"))}, where)
    return {**message, "content": joined(message["content"])}


def _parts(content: Any) -> Any:
    """As parts of a chat's message; what is none stays as it is, to be refused."""
    if not isinstance(content, list):
        return content
    return [_part(part) if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part for part in content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in _BESIDE_TEXT} | {"type": "text"}


def _called(given: dict[str, Any], where: str) -> dict[str, Any]:
    only(given, (*_OF_ITEMS, "call_id", "name", "arguments"), where)
    name, call_id, arguments = (text(given.get(each), f"{where}.{each}") for each in ("name", "call_id", "arguments"))
    try:
        function = {"name": name, "arguments": parse_object(arguments.encode())}
    except InvalidRow:
        raise wrong_value(arguments, f"{where}.arguments", "the text of a JSON object") from None
    call = {"type": "function", "function": function, "id": call_id}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _returned(given: dict[str, Any], where: str) -> dict[str, Any]:
    only(given, (*_OF_ITEMS, "call_id", "output"), where)
    output = as_row_error(read_content, _parts(given.get("output")), f"{where}.output")
    return {"role": "tool", "content": joined(output), "tool_call_id": text(given.get("call_id"), f"{where}.call_id")}


def _thought(given: dict[str, Any], where: str) -> dict[str, Any]:
    only(given, (*_OF_ITEMS, "summary", "content", "encrypted_content"), where)
    for name in ("summary", "encrypted_content"):
        if given.get(name):
            raise InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, not_supported(f"{where}.{name}"), f"{where}.{name}")
    parts = given.get("content", [])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise wrong_type(parts, f"{where}.content", "a list of parts of type reasoning_text")
    said = [text(part.get("text"), f"{where}.content[{index}].text") for index, part in enumerate(parts)]
    return {"role": "assistant", "content": "", "reasoning_content": "\n".join(said)}


_ITEMS = {"message": _said, "function_call": _called, "function_call_output": _returned, "reasoning": _thought}


def _text_format(value: Any, param: str) -> str | None:
    settings = _object(value, param, ("format", "verbosity"))
    return response_format(settings["format"], f"{param}.format", flat=True) if "format" in settings else None


def _effort(value: Any, param: str) -> str | None:
    settings = _object(value, param, ("effort", "summary", "generate_summary"))
    return reasoning_effort(settings["effort"], f"{param}.effort") if "effort" in settings else None


def _object(value: Any, param: str, known: tuple[str, ...]) -> dict[str, Any]:
    """The fields that are given, of which only the first is supported."""
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object")
    only(value, known, param)
    given = {name: each for name, each in value.items() if each is not None}
    for name in known[1:]:
        if name in given:
            raise InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, not_supported(f"{param}.{name}"), f"{param}.{name}")
    return given


def _tools(value: Any, param: str) -> tuple[dict[str, Any], ...]:
    """Functions, whose fields stand beside the type."""
    if not isinstance(value, list):
        raise wrong_type(value, param, "a list of function tools")
    return tools([_tool(each, f"{param}[{index}]") for index, each in enumerate(value)], param)


def _tool(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise wrong_type(value, where, 'an object {"type": "function", "name": ...}')
    if value["type"] != "function":
        message = f"{where}: tools of type {shown(value['type'])} are not supported, only function"
        raise InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, message, where)
    return {"type": "function", "function": {name: each for name, each in value.items() if name != "type"}}


def _tool_choice(value: Any, param: str) -> str | NamedTool:
    if not isinstance(value, dict):
        return tool_choice(value, param)
    if value.get("type") == "function" and isinstance(value.get("name"), str):
        return NamedTool(value["name"])
    raise wrong_value(value, param, '"auto", "none", "required", or {"type": "function", "name": ...}')


def _include(value: Any, param: str) -> bool:
    """Whether log probabilities are to be in the answer."""
    if not isinstance(value, list):
        raise wrong_type(value, param, "a list of strings")
    for each in value:
        if each != _LOGPROBS:
            message = f"{param} has {shown(each)}, and only {_LOGPROBS!a} is supported; remove it"
            raise InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, message, param)
    return bool(value)


# Fields that a chat has under the same name.
SHARED = ("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
          "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias",
          "chat_template_kwargs", "max_thinking_tokens")  # fmt: skip

RESPONSE_FIELDS: Mapping[str, tuple[str, Check]] = {
    **{name: (name, FIELDS[name][Endpoint.CHAT]) for name in SHARED},
    "input": ("messages", input_items),
    "instructions": ("instructions", text),
    "max_output_tokens": ("max_tokens", whole(LIMITS["max_tokens"])),
    "text": ("response_format", _text_format),
    "reasoning": ("reasoning_effort", _effort),
    "tools": ("tools", _tools),
    "tool_choice": ("tool_choice", _tool_choice),
    "include": ("logprobs", _include),
    "top_logprobs": ("top_logprobs", whole(LIMITS["logprobs"])),
}
"""What a request may have: what a chat calls it, and its check."""

RESPONSE_IGNORED = tuple(name for name in IGNORED if name != "store")

# A field that would change the answer, or what becomes of it, and the values of it that would not.
RESPONSE_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "background": (False,),
    "store": (False,),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "max_tool_calls": (),
    "moderation": (),
}
# Those that need a response to be kept.
_KEPT = ("background", "store", "previous_response_id", "conversation", "prompt")


def read_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a chat, as `read_fields` has them. Raises `InvalidRow` with the names of `body`."""
    given: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in RESPONSE_FIELDS:
            called, check = RESPONSE_FIELDS[name]
            given[called] = check(value, name)
        elif not (
            name in RESPONSE_IGNORED
            or name.startswith(FREE_PREFIX)
            or changes_nothing(value, RESPONSE_UNSUPPORTED.get(name, ()))
        ):
            raise _refusal(name)
    if given.get("response_format", "") is None and not body["text"].get("format"):
        # Nothing was said of the form: it is the job's.
        del given["response_format"]
    if given.get("top_logprobs") and not given.get("logprobs"):
        message = f"top_logprobs needs {json.dumps([_LOGPROBS])} in include"
        raise InvalidRow(ErrorCode.INVALID_VALUE, message, "top_logprobs")
    if (instructions := given.pop("instructions", None)) and "messages" in given:
        system = {"role": "system", "content": instructions}
        given["messages"] = ChatPrompt((system, *given["messages"].messages))
    return given


def _refusal(name: str) -> InvalidRow:
    if name in RESPONSE_UNSUPPORTED:
        kept = f"{name} is not supported: no response is kept from one request to the next; remove it"
        message = kept if name in _KEPT else not_supported(name)
        return InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, message, name)
    if (meant := Endpoint.RESPONSE.called(name)) != name:
        return InvalidRow(ErrorCode.UNKNOWN_PARAMETER, f"{name!a} is not a known field; did you mean {meant}?", name)
    return unknown(name, tuple(RESPONSE_FIELDS))


def repeated_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer says of its request, with OpenAI's defaults; `body` has been read."""
    given = {name: value for name, value in body.items() if value is not None}
    return {
        "instructions": given.get("instructions"),
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
        "text": {"format": {"type": "text"}} | {name: each for name, each in given.get("text", {}).items() if each},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": given.get("top_logprobs", 0),
        "user": given.get("user"),
    }
