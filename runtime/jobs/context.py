"""Whether a row fits the model's context. Counts tokens only; nothing is ever cut to make it fit."""

from __future__ import annotations

from .codes import ErrorCode
from .rows import Row, RowError


def context_error(row: Row, num_prompt_tokens: int, context_tokens: int) -> RowError | None:
    """The error of a row whose longest prompt and its answer together exceed the context."""
    max_tokens = row.params.max_tokens
    if num_prompt_tokens + max_tokens <= context_tokens:
        return None
    message = (
        f"{num_prompt_tokens} prompt tokens and {max_tokens} to generate are {num_prompt_tokens + max_tokens},"
        f" the context has {context_tokens}; shorten the prompt or lower max_tokens"
    )
    return RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, None, row.line)
