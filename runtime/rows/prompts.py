"""The `messages` and the `prompt` of a row. Knows no chat template; content that is not text is refused."""

from __future__ import annotations

from typing import Any

from .error_codes import ErrorCode, RowFault
from .row import ChatPrompt, Message, TextPrompt, TokenPrompt
from .validators import shown, token_ids, wrong_type, wrong_value

# OpenAI renamed system to developer; chat templates know the old name only.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What a stored answer carries beside its text when it comes back as a message.
_IGNORED = {"annotations"}
_UNSUPPORTED = {"tool_calls", "tool_call_id", "function_call", "audio", "refusal", "reasoning", "reasoning_content"}


def messages(value: Any, param: str) -> ChatPrompt:
    if not isinstance(value, list):
        raise wrong_type(value, param, "a list of messages")
    if not value:
        raise wrong_value(value, param, "at least one message")
    return ChatPrompt(tuple(_message(item, f"{param}[{i}]") for i, item in enumerate(value)))


def _message(value: Any, param: str) -> Message:
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object with role and content")
    given = {key: item for key, item in value.items() if item is not None and key not in _IGNORED}
    role, name = given.pop("role", None), given.pop("name", None)
    if not isinstance(role, str) or role not in ROLES:
        raise wrong_value(role, f"{param}.role", f"one of {', '.join(ROLES)}")
    if name is not None and not isinstance(name, str):
        raise wrong_type(name, f"{param}.name", "a string")
    content = _content(given.pop("content", None), f"{param}.content")
    if given:
        raise _refusal(next(iter(given)), param)
    return Message(ROLES[role], content, name)


def _refusal(key: str, param: str) -> RowFault:
    known = key in _UNSUPPORTED
    code = ErrorCode.UNSUPPORTED_PARAMETER if known else ErrorCode.UNKNOWN_PARAMETER
    message = f"{key[:64]!a} of {param} is not {'supported' if known else 'a known field'}; remove it"
    return RowFault(code, message, f"{param}.{key[:64]}")


def _content(value: Any, param: str) -> str:
    """Text parts are joined by newlines, as vLLM joins them for templates that take strings."""
    if isinstance(value, str):
        return value
    if value is None:
        raise RowFault(ErrorCode.MISSING_PARAMETER, f"{param} is missing", param)
    if not isinstance(value, list) or not value:
        raise wrong_type(value, param, "a string or a list of text parts")
    return "\n".join(_part(part, f"{param}[{i}]") for i, part in enumerate(value))


def _part(value: Any, param: str) -> str:
    if not isinstance(value, dict):
        raise wrong_type(value, param, 'an object {"type": "text", "text": ...}')
    if value.get("type") != "text":
        kind = shown(value.get("type"))
        raise RowFault(
            ErrorCode.UNSUPPORTED_PARAMETER, f"{param}: parts of type {kind} are not supported, only text", param
        )
    if set(value) != {"type", "text"} or not isinstance(value["text"], str):
        raise wrong_type(value.get("text"), f"{param}.text", "a string, and nothing beside type and text")
    return value["text"]


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
