"""One prompt through a freshly loaded engine, as a stream of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..offload.memory import host_available
from .errors import DoesNotFit
from .load import load_engine
from .planner import Settings, make_plan
from .sampling.params import SamplingParams
from .sequence import Sequence
from .shape.folder import read_shape
from .text.tokenizer import Tokenizer


def answer(folder: Path, prompt: str, settings: Settings, params: SamplingParams, raw: bool) -> Iterator[str]:
    """Yields text that will not change any more; `raw` continues the prompt without a chat template."""
    shape = read_shape(folder)
    with Tokenizer.load(folder) as tokenizer:
        if tokenizer.has_chat_template and not raw:
            prompt_ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            prompt_ids = tokenizer.encode(prompt)
        text = tokenizer.stream(params.stop)
        sequence = Sequence(prompt_ids, params, frozenset(tokenizer.eos_token_ids), text=text)
        if sequence.max_tokens > shape.context:
            raise DoesNotFit(
                f"{len(prompt_ids)} prompt tokens and {params.max_tokens} to generate are more than the context of "
                f"{shape.context}; shorten the prompt or lower --max-tokens"
            )
        plan = make_plan(shape, settings, host_available(), sequence.max_tokens)
        engine = load_engine(folder, shape, plan).engine
        engine.add(sequence)
        while engine.busy:
            engine.step()
            yield text.take()
        text.finish()
        yield text.take()
