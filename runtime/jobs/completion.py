"""What the engine made of one choice of a row, ready to be answered. Knows no JSON and no endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


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
