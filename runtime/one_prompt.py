"""One prompt through a freshly loaded engine, as a stream of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..offload.memory import host_available
from .errors import DoesNotFit
from .load import load_engine
from .planner import Settings, make_plan
from .sampling.params import SamplingParams
from .sequence import Sequence
from .shape.folder import read_shape
from .text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Wish:
    """How the prompt is to be answered; `raw` continues it without the chat template."""

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    raw: bool = False


def answer(folder: Path, prompt: str, settings: Settings, wish: Wish) -> Iterator[str]:
    """Yields text that will not change any more. Raises DoesNotFit where the context is too short for the wish."""
    shape = read_shape(folder)
    with Tokenizer.load(folder) as tokenizer:
        prompt_ids = _encode(tokenizer, prompt, wish.raw)
        params = SamplingParams(
            _max_tokens(len(prompt_ids), shape.context, wish.max_tokens),
            temperature=wish.temperature,
            seed=wish.seed,
        )
        text = tokenizer.stream()
        sequence = Sequence(prompt_ids, params, frozenset(tokenizer.eos_token_ids), text=text)
        plan = make_plan(shape, settings, host_available(), sequence.max_tokens)
        engine = load_engine(folder, shape, plan).engine
        engine.add(sequence)
        while engine.busy:
            engine.step()
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
