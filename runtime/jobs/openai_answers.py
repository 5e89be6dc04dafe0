"""Answers in OpenAI's batch form: one line around a chat.completion, a text_completion or an error.

Ids are hashes of the row's id, so that the same job writes the same bytes whenever and however often it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from .codes import ErrorCode
from .completion import Completion, TokenLogprob, usage
from .rows import Endpoint, Row, RowError

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
