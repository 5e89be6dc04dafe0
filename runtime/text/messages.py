"""A conversation as a chat template sees it: roles and contents, nothing else. Knows no tokens and no template."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import PromptError
from .limits import check_text

# A closed set: templates write the role between control tokens, unmarked.
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
"""`role`: one of `ROLES`, `content`: str or a list of `{"type": "text", "text": str}`."""


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A deep copy of `messages` without fields that are None. Raises `PromptError` on anything but roles and texts."""
    copies = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    check_text("".join(texts(copies)), "the conversation")
    return copies


def texts(messages: Iterable[Message]) -> list[str]:
    """The texts of all contents, in order."""
    return [text for message in messages for text in _content_texts(message.get("content", []))]


def with_texts(messages: Iterable[Message], replacements: Iterable[str]) -> list[dict[str, Any]]:
    """A copy of `messages` whose texts, in the order of `texts`, are `replacements`."""
    source = iter(replacements)
    copies = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [{**part, "text": next(source)} for part in content]
        elif content is not None:
            content = next(source)
        copies.append(dict(message) if content is None else {**message, "content": content})
    return copies


def joined_parts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """A copy of `messages` in which a list of parts is one text, a line per part."""
    return [
        {**message, "content": "\n".join(_content_texts(message["content"]))} if "content" in message else dict(message)
        for message in messages
    ]


def has_parts(messages: Iterable[Message]) -> bool:
    return any(isinstance(message.get("content"), list) for message in messages)


def _content_texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _message(message: Message, where: str) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    if unknown := sorted(kept.keys() - {"role", "content"}):
        raise PromptError(f"{where} has {unknown[0]!r}; a message has a role and a content: remove it.")
    if kept.get("role") not in ROLES:
        raise PromptError(f"{where} has the role {str(kept.get('role'))[:40]!r}; use one of {', '.join(ROLES)}.")
    if "content" in kept:
        kept["content"] = _content(kept["content"], where)
    return kept


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return [{"type": "text", "text": part["text"]} for part in content]
    raise PromptError(f"{where}.content is neither a text nor a list of text parts; send text only.")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
