"""The `prompt` of a row in its four spellings: text, token ids, or a list of either."""

from __future__ import annotations

from typing import Any

from .checks import token_ids, wrong_type, wrong_value
from .rows import TextPrompt, TokenPrompt

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
