"""One prompt through a freshly loaded engine, as a stream of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.sequence import Sequence
from ..jobs.encode import RowEncoder
from ..jobs.run import AnswerText
from ..plan.placement import Workload
from ..sampling.model_defaults import model_defaults
from ..sampling.params import SamplingParams
from ..settings.budgets import Budgets
from ..settings.errors import DoesNotFit
from ..settings.settings import Settings
from ..text.chat_stream import StreamOptions
from ..text.tokenizer import Tokenizer
from .generation import Generation
from .model import OpenModel

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How the prompt is to be answered; `raw` continues it without the chat template, which else gets `variables`.

    Without a temperature the model's generation_config.json sets it.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    raw: bool = False
    max_thinking_tokens: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def answer(model: str, prompt: str, settings: Settings, budgets: Budgets, options: PromptOptions) -> Iterator[str]:
    """Yields text that will not change any more. Raises DoesNotFit where the context is too short for `options`.

    What an `LLM` would do for any prompt, planned for this one alone, and without a rehearsal: there is no other pass.
    """
    with OpenModel(model) as opened:
        source, tokenizer = opened.source, opened.tokenizer
        prompt_ids = _encode(tokenizer, prompt, options)
        max_tokens = _max_tokens(len(prompt_ids), source.shape.context, options.max_tokens)
        params = _params(source.folder, max_tokens, options)
        sequence, text = _sequence(tokenizer, prompt_ids, params, options.raw)
        loaded = opened.load(settings, budgets, Workload(1, sequence.max_tokens))
        encoder = RowEncoder(tokenizer, source.shape.vocab, source.shape.context)
        yield from Generation(loaded.engine.engine, encoder).text(sequence, text)


def _params(folder: Path, max_tokens: int, options: PromptOptions) -> SamplingParams:
    values = dict(model_defaults(folder).values)
    if options.temperature is not None:
        values["temperature"] = options.temperature
    return SamplingParams(max_tokens, seed=options.seed, max_thinking_tokens=options.max_thinking_tokens, **values)


def _sequence(
    tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams, raw: bool
) -> tuple[Sequence, AnswerText]:
    """The sequence, and the text that grows with it."""
    eos_ids = frozenset(tokenizer.eos_token_ids)
    if not raw and tokenizer.has_chat_template:
        bounds = StreamOptions(max_thinking_tokens=params.max_thinking_tokens)
        if (parts := tokenizer.chat_stream(prompt_ids, bounds)) is not None:
            return Sequence(prompt_ids, params, eos_ids | tokenizer.chat_stop_ids, text=parts, parts=parts), parts
    text = tokenizer.stream()
    return Sequence(prompt_ids, params, eos_ids, text=text), text


def _encode(tokenizer: Tokenizer, prompt: str, options: PromptOptions) -> list[int]:
    if options.raw or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}], variables=options.variables)


def _max_tokens(num_prompt: int, context: int, wanted: int | None) -> int:
    free = context - num_prompt
    if free < (wanted or 1):
        raise DoesNotFit(
            f"{num_prompt} prompt tokens and {wanted or 1} to generate are more than the context of {context}; "
            "shorten the prompt or lower --max-tokens"
        )
    return wanted or min(DEFAULT_MAX_TOKENS, free)
