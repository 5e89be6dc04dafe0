"""How a prompt is continued, and what comes back, in vLLM's names. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .runtime.rows.fields import read_fields
from .runtime.rows.row import Endpoint, InvalidRow
from .runtime.sampling.params import TokenLogprob
from .runtime.settings.errors import BadArgument


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural logarithm of its probability, under the model's own logits: before penalties, temperature and
    filters. `rank` is 1 for the likeliest token; `decoded_token` is the token's text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer; `index` counts the `n` answers to a prompt from 0.

    `finish_reason` is "stop" where the model, a stop string or a grammar ended the answer, "length" where `max_tokens`
    did, and "error" where there was no next token: then `error` says why, and `text` is what there was before.
    `token_ids` are the generated ones, the end token among them. `logprobs` has a dict for every token of `token_ids`,
    by token id: the token itself and the likeliest ones; None where none were asked for. `reasoning_content` is what a
    thinking model wrote before the content of a chat answer; None where it did not reason.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    reasoning_content: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the tokens of the answer; None where no logprobs were asked for."""
        if self.logprobs is None:
            return None
        return sum(each[token_id].logprob for each, token_id in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. `prompt` is its text, for messages that of the chat template with control tokens;
    None where token ids were given. `prompt_token_ids` is what the model read. `prompt_logprobs` has None for the first
    of its tokens, and for those before `logprob_start_len`, and a dict for every other one, as `logprobs` of an answer;
    None where none were asked for. `error` says why a prompt was not run, which then has no outputs."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None


def logprobs_by_id(
    tokens: Sequence[TokenLogprob], num_top: int, token_text: Callable[[int], tuple[str, bytes]]
) -> list[dict[int, Logprob]]:
    """One dict a token: the `num_top` likeliest tokens, best first, and the token itself."""
    found = []
    for token in tokens:
        best = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(token.top[:num_top], 1)}
        best.setdefault(token.token_id, (token.logprob, token.rank))
        found.append({each: Logprob(*values, token_text(each)[0]) for each, values in best.items()})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a prompt is continued. The names are vLLM's; two defaults are those of `moedge batch`, and not vLLM's:
    `temperature` is 0 (vLLM: 1), and `max_tokens` 256 (vLLM: 16). A call that is given none takes temperature, filters
    and repetition penalty from the model's generation_config.json.

    - `n`: answers to each prompt, 1 to 128. The prompt is computed once for all of them.
    - `max_tokens`: tokens of an answer at most. It counts against `max_model_len` together with the prompt.
    - `temperature`: 0 is greedy: always the likeliest token.
    - `top_k`, `top_p`, `min_p`: filters of the tokens that are drawn from; 0 (or -1), 1 and 0 switch them off.
    - `repetition_penalty`, `presence_penalty`, `frequency_penalty`: 1, 0 and 0 switch them off.
    - `seed`: equal seeds draw equally. None derives one from the seed of the `LLM` and the index of the prompt.
    - `stop`: strings that end an answer; the text ends before the one that is complete first.
    - `stop_token_ids`: token ids that end an answer; they are its last token.
    - `ignore_eos`: continue past the model's end token, to `max_tokens`.
    - `logprobs`: this many of the likeliest tokens, 0 to 20, are reported for every token; None reports nothing.
    - `prompt_logprobs`: the same for the tokens of the prompt, behind its first one.
    - `logprob_start_len`: with `prompt_logprobs`, the position of the first token that is reported; what comes before
      it may come from the prefix cache.
    - `response_format`: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": {...}}}` as in
      OpenAI's API: answers are JSON of that form. Needs the extra `json` (docs/batches.md).

    Raises BadArgument, a ValueError, which says what was found and what was wanted.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        try:
            read_fields(self.body(Endpoint.COMPLETION), Endpoint.COMPLETION)
        except InvalidRow as error:
            raise BadArgument(str(error)) from None

    def body(self, endpoint: Endpoint) -> dict[str, Any]:
        """The fields of a row for `endpoint` that asks for the same; what is None is not in it."""
        body = {field.name: getattr(self, field.name) for field in fields(self)}
        body["stop"] = self.stop if isinstance(self.stop, str) else list(self.stop)
        body["stop_token_ids"] = list(self.stop_token_ids)
        if self.response_format is not None:
            body["response_format"] = dict(self.response_format)
        if endpoint is Endpoint.CHAT and self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return {name: value for name, value in body.items() if value is not None}
