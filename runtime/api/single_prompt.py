"""One prompt through a freshly loaded engine, as a stream of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..engine.sequence import Sequence
from ..jobs.encode import RowEncoder
from ..plan.placement import Workload
from ..sampling.params import SamplingParams
from ..settings.budgets import Budgets
from ..settings.errors import DoesNotFit
from ..settings.settings import Settings
from ..text.tokenizer import Tokenizer
from .generation import Generation
from .model import OpenModel

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How the prompt is to be answered; `raw` continues it without the chat template."""

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    raw: bool = False


def answer(model: str, prompt: str, settings: Settings, budgets: Budgets, options: PromptOptions) -> Iterator[str]:
    """Yields text that will not change any more. Raises DoesNotFit where the context is too short for `options`.

    What an `LLM` would do for any prompt, planned for this one alone, and without a rehearsal: there is no other pass.
    """
    with OpenModel(model) as opened:
        source, tokenizer = opened.source, opened.tokenizer
        prompt_ids = _encode(tokenizer, prompt, options.raw)
        max_tokens = _max_tokens(len(prompt_ids), source.shape.context, options.max_tokens)
        params = SamplingParams(max_tokens, temperature=options.temperature, seed=options.seed)
        text = tokenizer.stream()
        sequence = Sequence(prompt_ids, params, frozenset(tokenizer.eos_token_ids), text=text)
        loaded = opened.load(settings, budgets, Workload(1, sequence.max_tokens))
        encoder = RowEncoder(tokenizer, source.shape.vocab, source.shape.context)
        yield from Generation(loaded.engine.engine, encoder).text(sequence, text)


def _encode(tokenizer: Tokenizer, prompt: str, raw: bool) -> list[int]:
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _max_tokens(num_prompt: int, context: int, wanted: int | None) -> int:
    free = context - num_prompt
    if free < (wanted or 1):
        raise DoesNotFit(
            f"{num_prompt} prompt tokens and {wanted or 1} to generate are more than the context of {context}; "
            "shorten the prompt or lower --max-tokens"
        )
    return wanted or min(DEFAULT_MAX_TOKENS, free)
