"""What generation returns, in vLLM's names. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..sampling.params import TokenLogprob


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
