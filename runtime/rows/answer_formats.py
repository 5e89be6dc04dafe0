"""Rows out: one line of ASCII JSON per row, in the form that the row was asked in.

A line is a function of the row, its completions, the model's name and the job's start; nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from .error_codes import ErrorCode
from .row import BadRow, Endpoint, Row, RowError


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its natural log probability; `top` holds the alternatives, likeliest first.

    `utf8` is None where the token's bytes are not known; alone they need not be whole characters.
    """

    text: str
    logprob: float
    utf8: bytes | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` are the generated ones; `num_prompt_tokens` belongs to the prompt that was continued.

    `cut`: the text is the beginning of a JSON value, which `max_tokens` ended before it was whole.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    cut: bool = False


def usage(completions: Sequence[Completion], num_samples: int) -> dict[str, int]:
    """OpenAI's counts; a prompt counts once, however many samples were drawn from it."""
    prompt = sum(completion.num_prompt_tokens for completion in completions[::num_samples])
    generated = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


# JSON has no -inf; OpenAI and vLLM write this for "practically never".
MIN_LOGPROB = -9999.0
# What a row gets though nothing is wrong with it.
_NOT_THE_ROWS = {ErrorCode.NUMERICAL_ERROR, ErrorCode.WORKER_CRASHED}


def openai_answer(row: Row, completions: Sequence[Completion], model: str, created: int) -> dict[str, Any]:
    chat = row.endpoint is Endpoint.CHAT
    body = {
        "id": ("chatcmpl-" if chat else "cmpl-") + _digest(row.id, b"body"),
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_choice(row, index, completion) for index, completion in enumerate(completions)],
        "usage": usage(completions, row.num_samples),
    }
    return _line(row.id, 200, body)


def openai_failure(row_id: str, error: RowError) -> dict[str, Any]:
    """OpenAI reports a row's error in the response's body and leaves the line's own `error` null."""
    status_code, kind = (500, "server_error") if error.code in _NOT_THE_ROWS else (400, "invalid_request_error")
    content = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return _line(row_id, status_code, {"error": content})


def _line(row_id: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "batch_req_" + _digest(row_id, b"line"),
        "custom_id": row_id,
        "response": {"status_code": status_code, "request_id": "req_" + _digest(row_id, b"request"), "body": body},
        "error": None,
    }


def _choice(row: Row, index: int, completion: Completion) -> dict[str, Any]:
    chat = row.endpoint is Endpoint.CHAT
    choice: dict[str, Any] = {"index": index}
    if chat:
        content = None if completion.cut else completion.text
        choice["message"] = {"role": "assistant", "content": content, "refusal": None}
    else:
        choice["text"] = "" if completion.cut else completion.text
    if completion.cut:
        choice["partial"] = completion.text
    shape = _chat_logprobs if chat else _completion_logprobs
    choice["logprobs"] = None if completion.logprobs is None else shape(completion.logprobs)
    choice["finish_reason"] = completion.finish_reason
    if row.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [_chat_token(token) | {"top_logprobs": [_chat_token(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    utf8 = None if token.utf8 is None else list(token.utf8)
    return {"token": token.text, "logprob": max(token.logprob, MIN_LOGPROB), "bytes": utf8}


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token.text))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [max(token.logprob, MIN_LOGPROB) for token in tokens],
        "top_logprobs": [_by_text(token.top) for token in tokens],
        "text_offset": offsets[:-1],
    }


def _by_text(top: Sequence[TokenLogprob]) -> dict[str, float]:
    """Of tokens that look alike the likeliest stays: it comes first, so it is written last."""
    return {token.text: max(token.logprob, MIN_LOGPROB) for token in reversed(top)}


def _digest(row_id: str, purpose: bytes) -> str:
    return blake2b(row_id.encode(), digest_size=16, person=purpose).hexdigest()


def short_answer(row: Row, completions: Sequence[Completion]) -> dict[str, Any]:
    """With n above 1 the choices are listed under `choices`, each as the single one would have been."""
    choices = [_short_choice(row, completion) for completion in completions]
    answer = choices[0] if row.num_samples == 1 else {"choices": choices}
    return {"id": row.id} | answer | {"usage": usage(completions, row.num_samples)}


def short_failure(row_id: str, error: RowError) -> dict[str, Any]:
    return {"id": row_id, "error": {"code": error.code, "message": error.message, "param": error.param}}


def _short_choice(row: Row, completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": None if completion.cut else completion.text}
    if completion.cut:
        choice["partial"] = completion.text
    choice["finish_reason"] = completion.finish_reason
    if row.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice


class Answers:
    def __init__(self, model: str, created: int) -> None:
        """`model` is the name that answers carry, `created` the job's start in seconds since 1970."""
        self._model = model
        self._created = created

    def answer(self, row: Row, completions: Sequence[Completion]) -> str:
        """`completions` in the order of `row.choices()`, one for each."""
        wanted = len(row.prompts) * row.num_samples
        if len(completions) != wanted:
            raise ValueError(f"row {row.id!r} has {wanted} choices, found {len(completions)} completions")
        if row.short:
            return _dump(short_answer(row, completions))
        return _dump(openai_answer(row, completions, self._model, self._created))

    def failure(self, row: Row | BadRow, error: RowError) -> str:
        return _dump((short_failure if row.short else openai_failure)(row.id, error))


def _dump(answer: dict[str, Any]) -> str:
    return _ENCODER.encode(answer)


# ASCII, because readers that split lines the Unicode way would cut an answer at U+2028.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
