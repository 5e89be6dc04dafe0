"""Prompts on their way through an engine: passes that end whole, finished answers, and text as it is generated; and
`answer`, one prompt through an engine that is loaded for it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .runtime.engine.engine import Engine
from .runtime.engine.sequence import Sequence
from .runtime.jobs.encode import Choices, RowEncoder
from .runtime.jobs.lifecycle import OpenModel
from .runtime.jobs.run import AnswerText, OpenRow
from .runtime.jobs.stop import DeferredInterrupt
from .runtime.plan.placement import Workload
from .runtime.rows.row import ChatPrompt, Endpoint, Row, TextPrompt
from .runtime.sampling.model_defaults import model_defaults
from .runtime.sampling.params import SequenceSampling
from .runtime.settings.errors import DoesNotFit
from .runtime.settings.settings import Budgets, Settings


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that was checked: its row, and the token ids and settings of each of its answers."""

    row: Row
    choices: Choices
    prompt: str | None


class Generation:
    """The prompts of one call."""

    def __init__(self, engine: Engine, encoder: RowEncoder) -> None:
        self._engine = engine
        self._encoder = encoder
        self._open: dict[Sequence, OpenRow] = {}

    def passes(self, next_request: Callable[[], Request | None]) -> Iterator[list[OpenRow]]:
        """Runs requests, in their order, as memory allows; yields after every pass what it finished.

        `next_request` gives None while there are none; it ends when nothing runs and there are none.
        """
        engine, open_rows = self._engine, self._open
        while True:
            while engine.scheduler.has_capacity and (request := next_request()) is not None:
                opened = OpenRow.start(request.row, request.choices, self._encoder)
                open_rows |= dict.fromkeys(opened.sequences, opened)
                for sequence in opened.first:
                    engine.add(sequence)
            if not engine.busy:
                return
            finished = []
            for sequence in self.step():
                opened = open_rows.pop(sequence)
                opened.num_open -= 1
                if not opened.num_open:
                    finished.append(opened)
            yield finished

    def drop(self, dropped: Callable[[Row], bool]) -> None:
        """Takes rows out, between two passes."""
        gone = {sequence for sequence, opened in self._open.items() if dropped(opened.row)}
        self._engine.abort(gone.__contains__)
        for sequence in gone:
            del self._open[sequence]

    def text(self, sequence: Sequence, text: AnswerText) -> Iterator[str]:
        """The text of one sequence, a piece per pass; pieces do not change any more."""
        self._engine.add(sequence)
        while self._engine.busy:
            self.step()
            if piece := text.take():
                yield piece
        text.finish()
        if piece := text.take():
            yield piece

    def step(self) -> list[Sequence]:
        with DeferredInterrupt():
            return self._engine.step()


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
        encoder = RowEncoder(tokenizer, source.shape.vocab, source.shape.context)
        asked: TextPrompt | ChatPrompt = TextPrompt(prompt)
        if tokenizer.has_chat_template and not options.raw:
            asked = ChatPrompt(({"role": "user", "content": prompt},), variables=options.variables)
        prompt_ids = encoder.token_ids(asked)
        max_tokens = _max_tokens(len(prompt_ids), source.shape.context, options.max_tokens)
        params = _params(source.folder, max_tokens, options)
        begun = OpenRow.start(Row(0, 1, "", Endpoint.SHORT, (asked,), params), [(prompt_ids, params)], encoder)
        loaded = opened.load(settings, budgets, Workload(1, begun.sequences[0].max_tokens))
        yield from Generation(loaded.engine.engine, encoder).text(begun.sequences[0], begun.texts[0])


def _params(folder: Path, max_tokens: int, options: PromptOptions) -> SequenceSampling:
    values = dict(model_defaults(folder).values)
    if options.temperature is not None:
        values["temperature"] = options.temperature
    return SequenceSampling(max_tokens, seed=options.seed, max_thinking_tokens=options.max_thinking_tokens, **values)


def _max_tokens(num_prompt: int, context: int, wanted: int | None) -> int:
    free = context - num_prompt
    if free < (wanted or 1):
        raise DoesNotFit(
            f"{num_prompt} prompt tokens and {wanted or 1} to generate are more than the context of {context}; "
            "shorten the prompt or lower --max-tokens"
        )
    return wanted or min(DEFAULT_MAX_TOKENS, free)
