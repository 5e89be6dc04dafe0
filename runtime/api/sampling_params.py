"""How prompts are continued, as a Python caller says it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..rows.failure import InvalidRow
from ..rows.fields import read_fields
from ..rows.row import Endpoint
from ..settings.errors import BadArgument


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
