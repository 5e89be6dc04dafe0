"""Rows out: one line of ASCII JSON per row, in the form that the row was asked in.

A line is a function of the row, its completions, the model's name and the job's start; nothing else.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import exp
from typing import Any, Self

from ..sampling.params import FinishReason, TokenLogprob
from ..text.messages import FunctionCall
from .row import Endpoint, ErrorCode, Row, RowFailure

# The text of a token id, and its bytes: None where they are not known; alone they need not be whole characters.
TokenText = Callable[[int], tuple[str, bytes | None]]


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` are the generated ones; `num_prompt_tokens` belongs to the prompt that was continued.

    Of a chat answer whose parts are known, `reasoning` is what came before the text, and `reasoning_tokens` counts it
    with its marks; `answered` is False where the text never began. `calls` are functions that the model calls.
    `prompt_logprobs` are those of the prompt's last tokens, all but the first unless the row asks for fewer.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str | None = None
    reasoning_tokens: int | None = None
    answered: bool = True
    calls: tuple[FunctionCall, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def content(self) -> str | None:
        """The text where it is an answer, or the answer is nothing else."""
        missing = not self.answered or (self.calls and not self.text)
        return None if missing else self.text

    @property
    def beside(self) -> dict[str, Any]:
        """What an answer has beside its text, where it has it."""
        return {} if self.reasoning is None else {"reasoning_content": self.reasoning}


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """How likely a model finds each of some given answers to a prompt.

    `logprobs` are the natural logarithms of their probabilities under the model's own logits, summed over the tokens of
    each answer, in the order of `choices`: longer answers have smaller ones.
    """

    choices: tuple[str, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def from_completions(cls, row: Row, completions: Sequence[Completion]) -> Self:
        """Those of the answers that `row` has scored."""
        return cls(row.scored, tuple(sum(_floored(token.logprob) for token in _scored(each)) for each in completions))

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Of each choice, if the answer is one of them: they sum to 1."""
        shares = [exp(each - max(self.logprobs)) for each in self.logprobs]
        return tuple(each / sum(shares) for each in shares)

    @property
    def best(self) -> str:
        """The likeliest choice; of equal ones the first."""
        return self.choices[self.logprobs.index(max(self.logprobs))]


def usage(row: Row, completions: Sequence[Completion]) -> dict[str, Any]:
    """OpenAI's counts; a prompt counts once, however many samples were drawn from it, or answers to it were scored.

    Tokens of reasoning are counted where the model's marks of it are known.
    """
    if row.scored:
        before = completions[0].num_prompt_tokens - len(_scored(completions[0]))
        prompt, generated = before + sum(len(_scored(each)) for each in completions), 0
    else:
        prompt = sum(completion.num_prompt_tokens for completion in completions[:: row.num_samples])
        generated = sum(len(completion.token_ids) for completion in completions)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
    }  # fmt: skip
    reasoning = [each.reasoning_tokens for each in completions if each.reasoning_tokens is not None]
    return counts | ({"completion_tokens_details": {"reasoning_tokens": sum(reasoning)}} if reasoning else {})


def _scored(completion: Completion) -> tuple[TokenLogprob, ...]:
    """The tokens of the prompt whose log probabilities were asked for."""
    return completion.prompt_logprobs or ()


# JSON has no -inf; OpenAI and vLLM write this for "practically never".
MIN_LOGPROB = -9999.0


def _floored(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


# The finish reason of an answer that was given, and not generated.
SCORED = "scored"
# What a row gets although nothing is wrong with it.
_NOT_THE_ROWS = {ErrorCode.NUMERICAL_ERROR, ErrorCode.WORKER_CRASHED}


def openai_body(
    row: Row, completions: Sequence[Completion], model: str, created: int, token_text: TokenText
) -> dict[str, Any]:
    """The body of OpenAI's response."""
    if row.endpoint is Endpoint.RESPONSE:
        return response_body(row, completions[0], model, created, token_text)
    chat = row.endpoint is Endpoint.CHAT
    body = {
        "id": ("chatcmpl-" if chat else "cmpl-") + _digest(row.id, b"body"),
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_choice(row, index, completion, token_text) for index, completion in enumerate(completions)],
        "usage": usage(row, completions),
    }
    if chat:
        body |= _prompt_logprobs(row, completions[0], token_text)
    return {**body, **row.repeated}


def response_body(
    row: Row, completion: Completion | None, model: str, created: int, token_text: TokenText
) -> dict[str, Any]:
    """A response of the Responses API; one that is in progress has no completion yet."""
    name, cut = _digest(row.id, b"body"), completion is not None and completion.finish_reason is FinishReason.LENGTH
    status = "in_progress" if completion is None else "incomplete" if cut else "completed"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": model,
        "output": [] if completion is None else _items(row, completion, name, status, token_text),
        "usage": None if completion is None else _response_usage(completion),
        "temperature": row.params.temperature,
        "top_p": row.params.top_p,
        "background": False,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        **row.repeated,
    }


def _items(row: Row, completion: Completion, name: str, status: str, token_text: TokenText) -> list[dict[str, Any]]:
    """Reasoning, the text, and calls: each where there is one; the last is as complete as the response."""
    items: list[dict[str, Any]] = []
    if completion.reasoning:
        thought = {"type": "reasoning_text", "text": completion.reasoning}
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [thought]})
    if (content := completion.content) is not None:
        scored = completion.logprobs
        logprobs = [] if scored is None else _chat_logprobs(scored, token_text)["content"]
        said = {"type": "output_text", "text": content, "annotations": [], "logprobs": logprobs}
        items.append({"id": f"msg_{name}", "type": "message", "role": "assistant", "content": [said]})
    for call in _calls(row, 0, completion.calls):
        call_id = call["id"]
        items.append({"id": "fc_" + call_id[5:], "type": "function_call", "call_id": call_id, **call["function"]})
    return [item | {"status": status if index == len(items) - 1 else "completed"} for index, item in enumerate(items)]


def _response_usage(completion: Completion) -> dict[str, Any]:
    prompt, generated = completion.num_prompt_tokens, len(completion.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens or 0},
        "total_tokens": prompt + generated,
    }


def openai_failure(failure: RowFailure) -> dict[str, Any]:
    """OpenAI reports a row's error in the response's body and leaves the line's own `error` null."""
    status_code, kind = (500, "server_error") if failure.code in _NOT_THE_ROWS else (400, "invalid_request_error")
    content: dict[str, Any] = {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code}
    return with_own(_line(failure.id, status_code, {"error": content | _partial(failure)}), failure.own)


# What answers say themselves, in either form: a field of the user's with such a name gets a prefix in every answer.
ANSWER_KEYS = frozenset(
    (
        *("id", "custom_id", "response", "error", "text", "partial", "finish_reason", "usage", "choices", "token_ids"),
        *("logprobs", "prompt_logprobs", "reasoning_content", "tool_calls", "probability", "probabilities"),
    )
)
OWN_PREFIX = "input_"


def with_own(answer: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The answer, and the user's own fields behind it under their names, or with a prefix where those are taken."""
    for name, value in own.items():
        shown = name
        while shown in answer or shown in ANSWER_KEYS or (shown != name and shown in own):
            shown = OWN_PREFIX + shown
        answer[shown] = value
    return answer


def _line(row_id: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "batch_req_" + _digest(row_id, b"line"),
        "custom_id": row_id,
        "response": {"status_code": status_code, "request_id": "req_" + _digest(row_id, b"request"), "body": body},
        "error": None,
    }


def _choice(row: Row, index: int, completion: Completion, token_text: TokenText) -> dict[str, Any]:
    chat = row.endpoint is Endpoint.CHAT
    choice: dict[str, Any] = {"index": index}
    if chat:
        choice["message"] = {"role": "assistant", "content": completion.content, "refusal": None, **completion.beside}
        if completion.calls:
            choice["message"]["tool_calls"] = _calls(row, index, completion.calls)
    else:
        choice["text"] = completion.text
    scored = completion.logprobs
    choice["logprobs"] = None if scored is None else openai_logprobs(row, scored, token_text)
    choice["finish_reason"] = completion.finish_reason
    if row.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice if chat else choice | _prompt_logprobs(row, completion, token_text)


def _prompt_logprobs(row: Row, completion: Completion, token_text: TokenText) -> dict[str, Any]:
    """As vLLM writes them: null for the first token, and for others that were not asked for, then for each one it and
    the likeliest ones, by token id."""
    if completion.prompt_logprobs is None:
        return {}
    start = min(max(1, row.params.logprob_start_len), completion.num_prompt_tokens)
    found: list[dict[str, Any] | None] = [None] * start
    for token in completion.prompt_logprobs:
        by_id = {token.token_id: (token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top, 1):
            by_id.setdefault(token_id, (logprob, rank))
        found.append(
            {
                str(token_id): {
                    "logprob": _floored(logprob), "rank": rank, "decoded_token": token_text(token_id)[0],
                }
                for token_id, (logprob, rank) in by_id.items()
            }
        )  # fmt: skip
    return {"prompt_logprobs": found}


def _calls(row: Row, index: int, calls: Sequence[FunctionCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": "call_" + _digest(f"{row.id}:{index}:{number}", b"call")[:24],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(calls)
    ]


def openai_logprobs(row: Row, tokens: Sequence[TokenLogprob], token_text: TokenText, before: int = 0) -> dict[str, Any]:
    """The `logprobs` of a choice, or of a part of it that `before` characters of tokens are in front of."""
    chat = row.endpoint is not Endpoint.COMPLETION
    return _chat_logprobs(tokens, token_text) if chat else _completion_logprobs(tokens, token_text, before)


def _chat_logprobs(tokens: Sequence[TokenLogprob], token_text: TokenText) -> dict[str, Any]:
    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(token_id)
        utf8 = None if data is None else list(data)
        return {"token": text, "logprob": _floored(logprob), "bytes": utf8}

    content = [
        shown(token.token_id, token.logprob) | {"top_logprobs": [shown(*top) for top in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[TokenLogprob], token_text: TokenText, before: int) -> dict[str, Any]:
    texts = [token_text(token.token_id)[0] for token in tokens]
    # Log probabilities by token text; of tokens with the same text, the most likely one, which is written last.
    return {
        "tokens": texts,
        "token_logprobs": [_floored(token.logprob) for token in tokens],
        "top_logprobs": [
            {token_text(token_id)[0]: _floored(logprob) for token_id, logprob in reversed(token.top)}
            for token in tokens
        ],
        "text_offset": list(accumulate(map(len, texts), initial=before))[:-1],
    }


def _digest(row_id: str, purpose: bytes) -> str:
    return blake2b(row_id.encode(), digest_size=16, person=purpose).hexdigest()


def short_answer(row: Row, completions: Sequence[Completion], token_text: TokenText) -> dict[str, Any]:
    """With n above 1 the choices are listed under `choices`, each as the single one would have been."""
    if row.scored:
        return with_own({"id": row.id} | _scores(row, completions), row.own)
    choices = [_short_choice(row, index, completion) for index, completion in enumerate(completions)]
    answer = choices[0] if row.num_samples == 1 else {"choices": choices}
    beside = _prompt_logprobs(row, completions[0], token_text) | {"usage": usage(row, completions)}
    return with_own({"id": row.id} | answer | beside, row.own)


def _scores(row: Row, completions: Sequence[Completion]) -> dict[str, Any]:
    """The likeliest of the answers that were scored, its probability, and those of all."""
    found = ChoiceScores.from_completions(row, completions)
    return {
        "text": found.best,
        "probability": max(found.probabilities),
        "probabilities": dict(zip(found.choices, found.probabilities, strict=True)),
        "logprobs": dict(zip(found.choices, found.logprobs, strict=True)),
        "finish_reason": SCORED,
        "usage": usage(row, completions),
    }


def short_failure(failure: RowFailure) -> dict[str, Any]:
    error: dict[str, Any] = {"code": failure.code, "message": failure.message, "param": failure.param}
    return with_own({"id": failure.id, "error": error | _partial(failure)}, failure.own)


def _partial(failure: RowFailure) -> dict[str, str | list[str]]:
    """The text so far; a list of texts for a row of several choices."""
    texts = failure.partial
    return {"partial": texts[0] if len(texts) == 1 else list(texts)} if texts else {}


def _short_choice(row: Row, index: int, completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": completion.content, **completion.beside}
    if completion.calls:
        choice["tool_calls"] = _calls(row, index, completion.calls)
    choice["finish_reason"] = completion.finish_reason
    if row.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice


class Answers:
    """Writes lines of output."""

    def __init__(self, model: str, created: int, token_text: TokenText) -> None:
        """`model` is the name that answers carry, `created` the job's start in seconds since 1970.

        `token_text` is asked for the tokens of rows that want log probabilities.
        """
        self._token_text = token_text
        self._model = model
        self._created = created

    def answer(self, row: Row, completions: Sequence[Completion]) -> str:
        """`completions` in the order of `row.choices()`, one for each."""
        if row.short:
            return _ENCODER.encode(short_answer(row, completions, self._token_text))
        body = openai_body(row, completions, self._model, self._created, self._token_text)
        return _ENCODER.encode(with_own(_line(row.id, 200, body), row.own))

    def failure(self, failure: RowFailure) -> str:
        return _ENCODER.encode((short_failure if failure.short else openai_failure)(failure))


# ASCII, because readers that split lines the Unicode way would cut an answer at U+2028.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
