"""One prompt through a freshly loaded engine, as a stream of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.sequence import Sequence
from ..jobs.job_plan import plan_job
from ..loading.engine_loader import load_engine
from ..loading.machine_memory import open_memory
from ..loading.prepare import store_for
from ..plan.placement import Workload
from ..sampling.model_defaults import model_defaults
from ..sampling.params import SamplingParams
from ..settings.budgets import Budgets
from ..settings.errors import DoesNotFit
from ..settings.settings import Settings
from ..source.model_source import open_source
from ..text.chat_stream import ChatStream, StreamOptions
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Wish:
    """How the prompt is to be answered; `raw` continues it without the chat template, which else gets `variables`.

    Without a temperature the model's generation_config.json says it.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    raw: bool = False
    max_thinking_tokens: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def answer(model: str, prompt: str, settings: Settings, budgets: Budgets, wish: Wish) -> Iterator[str]:
    """Yields text that will not change any more. Raises DoesNotFit where the context is too short for the wish."""
    with open_source(model) as source, Tokenizer.load(source.folder) as tokenizer:
        prompt_ids = _encode(tokenizer, prompt, wish)
        max_tokens = _max_tokens(len(prompt_ids), source.shape.context, wish.max_tokens)
        params = _params(source.folder, max_tokens, wish)
        sequence, text = _sequence(tokenizer, prompt_ids, params, wish.raw)
        job = Workload(1, sequence.max_tokens)
        memory = open_memory(budgets, source.settle(settings), source.shape)
        result = plan_job(source, settings, budgets, memory.budget, job)
        memory.limit_pins(result.request.profile)
        plan = result.plan
        with closing(load_engine(source, plan, store_for(source, plan, budgets), memory.device)) as loaded:
            loaded.engine.add(sequence)
            while loaded.engine.busy:
                loaded.engine.step()
                yield text.take()
        text.finish()
        yield text.take()


def _params(folder: Path, max_tokens: int, wish: Wish) -> SamplingParams:
    values = dict(model_defaults(folder).values)
    if wish.temperature is not None:
        values["temperature"] = wish.temperature
    return SamplingParams(max_tokens, seed=wish.seed, max_thinking_tokens=wish.max_thinking_tokens, **values)


def _sequence(
    tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams, raw: bool
) -> tuple[Sequence, TextStream | ChatStream]:
    """The sequence, and the text that grows with it."""
    eos_ids = frozenset(tokenizer.eos_token_ids)
    if not raw and tokenizer.has_chat_template:
        options = StreamOptions(max_thinking_tokens=params.max_thinking_tokens)
        if (parts := tokenizer.chat_stream(prompt_ids, options)) is not None:
            return Sequence(prompt_ids, params, eos_ids | tokenizer.chat_stop_ids, text=parts, parts=parts), parts
    text = tokenizer.stream()
    return Sequence(prompt_ids, params, eos_ids, text=text), text


def _encode(tokenizer: Tokenizer, prompt: str, wish: Wish) -> list[int]:
    if wish.raw or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}], variables=wish.variables)


def _max_tokens(num_prompt: int, context: int, wanted: int | None) -> int:
    room = context - num_prompt
    if room < (wanted or 1):
        raise DoesNotFit(
            f"{num_prompt} prompt tokens and {wanted or 1} to generate are more than the context of {context}; "
            "shorten the prompt or lower --max-tokens"
        )
    return wanted or min(DEFAULT_MAX_TOKENS, room)
