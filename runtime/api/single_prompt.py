"""One prompt through a freshly loaded engine, as a stream of text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from ..engine.sequence import Sequence
from ..jobs.job_plan import plan_job
from ..loading.engine_loader import load_engine
from ..loading.machine_memory import open_memory
from ..loading.prepare import store_for
from ..plan.placement import Workload
from ..sampling.params import SamplingParams
from ..settings.budgets import Budgets
from ..settings.errors import DoesNotFit
from ..settings.settings import Settings
from ..source.model_source import open_source
from ..text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Wish:
    """How the prompt is to be answered; `raw` continues it without the chat template."""

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    raw: bool = False


def answer(model: str, prompt: str, settings: Settings, budgets: Budgets, wish: Wish) -> Iterator[str]:
    """Yields text that will not change any more. Raises DoesNotFit where the context is too short for the wish."""
    with open_source(model) as source, Tokenizer.load(source.folder) as tokenizer:
        prompt_ids = _encode(tokenizer, prompt, wish.raw)
        max_tokens = _max_tokens(len(prompt_ids), source.shape.context, wish.max_tokens)
        params = SamplingParams(max_tokens, temperature=wish.temperature, seed=wish.seed)
        text = tokenizer.stream()
        sequence = Sequence(prompt_ids, params, frozenset(tokenizer.eos_token_ids), text=text)
        job = Workload(1, sequence.max_tokens)
        memory = open_memory(budgets, source.settle(settings), source.shape)
        result = plan_job(source, settings, budgets, memory.budget, job)
        memory.limit_pins(result.request.profile)
        plan = result.plan
        store = store_for(source, plan, budgets)
        with closing(load_engine(source, plan, store and store.folder, memory.device)) as loaded:
            loaded.engine.add(sequence)
            while loaded.engine.busy:
                loaded.engine.step()
                yield text.take()
        text.finish()
        yield text.take()


def _encode(tokenizer: Tokenizer, prompt: str, raw: bool) -> list[int]:
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _max_tokens(num_prompt: int, context: int, wanted: int | None) -> int:
    room = context - num_prompt
    if room < (wanted or 1):
        raise DoesNotFit(
            f"{num_prompt} prompt tokens and {wanted or 1} to generate are more than the context of {context}; "
            "shorten the prompt or lower --max-tokens"
        )
    return wanted or min(DEFAULT_MAX_TOKENS, room)
