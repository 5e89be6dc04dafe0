"""The sampling parameters of a row, with their limits and results, and what a model's generation_config.json says of
those that nobody has given. Knows no tensor, no tokenizer and no row format.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """How one sequence is continued; every field is resolved, none refers to another default.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch their filters off.
    `logprobs` is the number of alternatives reported per token; None reports no log-probabilities; `prompt_logprobs`
    is the same for the prompt's tokens from position `logprob_start_len` on. `logit_bias` holds (token id, number added
    to its logit). Before `min_tokens` no token ends the sequence. `max_thinking_tokens` bounds the reasoning of a chat
    answer, unless it is None.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_thinking_tokens: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


_INT63 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """`low` to `high`, both included unless `open_low`; `value in limit` is False for NaN and infinities."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.open_low and value == self.low)

    def __str__(self) -> str:
        above = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        return above if self.high in (_INT63, sys.float_info.max) else f"{above} and at most {self.high:g}"


LIMITS = MappingProxyType(
    {
        "max_tokens": Limit(1, _INT63),
        "temperature": Limit(0.0, sys.float_info.max),
        "top_k": Limit(0, _INT63),
        "top_p": Limit(0.0, 1.0, open_low=True),
        "min_p": Limit(0.0, 1.0),
        "repetition_penalty": Limit(0.0, sys.float_info.max, open_low=True),
        "presence_penalty": Limit(-2.0, 2.0),
        "frequency_penalty": Limit(-2.0, 2.0),
        "seed": Limit(0, _INT63),
        "logprobs": Limit(0, 20),
        "prompt_logprobs": Limit(0, 20),
        "logprob_start_len": Limit(0, _INT63),
        "logit_bias": Limit(-100.0, 100.0),
        "min_tokens": Limit(0, _INT63),
        "max_thinking_tokens": Limit(0, _INT63),
    }
)


class FinishReason(StrEnum):
    """Why a sequence ended; ERROR never reaches an answer, because its row fails. No sequence ends with TOOL_CALLS:
    an answer does that was found to call functions."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability by the model's own logits, before penalties and filters.

    `rank` is 1 for the most likely token. `top` holds the most likely tokens, best first, lower id first among
    equals; tokens with a logit of -inf never appear, so that it can be shorter than requested.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
