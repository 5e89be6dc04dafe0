"""A job's passes: rows in, answers into the journal, the engine kept full in between. Knows no command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from ..engine.engine import Engine
from ..engine.sequence import Sequence
from ..rows.answer_formats import Answers, Completion, usage
from ..rows.failure import ErrorCode, RowFailure
from ..rows.row import Row
from ..sampling.params import FinishReason
from ..text.stream import TextStream
from .encode import RowEncoder
from .journal.journal import Journal
from .journal.record import Done

# Rows that go into work with one record of the journal.
_ADMITTED_TOGETHER = 16


@dataclass(slots=True)
class _OpenRow:
    """A row whose choices are being generated; `num_open` of them are not finished."""

    row: Row
    num_open: int
    sequences: list[Sequence] = field(default_factory=list)
    texts: list[TextStream] = field(default_factory=list)


class Job:
    """Runs rows through an engine; between two passes the engine's metrics and the journal are current."""

    def __init__(
        self,
        engine: Engine,
        encoder: RowEncoder,
        answers: Answers,
        journal: Journal,
        digest: Callable[[int], str],
    ) -> None:
        """`digest` identifies the line of a row, by the row's number."""
        self._engine = engine
        self._encoder = encoder
        self._answers = answers
        self._journal = journal
        self._digest = digest
        self._eos_ids = frozenset(encoder.tokenizer.eos_token_ids)
        self._open: dict[Sequence, _OpenRow] = {}

    def run(self, waves: Iterable[Iterator[Row | RowFailure]]) -> Iterator[None]:
        """One pass per iteration, until every row has its answer; a wave is finished before the next begins."""
        for rows in waves:
            more = True
            while more or self._engine.busy:
                while more and self._engine.scheduler.hungry:
                    more = self._admit(list(islice(rows, _ADMITTED_TOGETHER)))
                if self._engine.busy:
                    self._finish(self._engine.step())
                yield

    def _admit(self, rows: list[Row | RowFailure]) -> bool:
        """Whether there may be more."""
        runnable = [row.index for row in rows if isinstance(row, Row)]
        if runnable:
            # Before anything touches the row's text: whatever it does to this process, its successor knows of it.
            self._journal.begin(runnable)
        for row in rows:
            self._start(row)
        return bool(rows)

    def _start(self, row: Row | RowFailure) -> None:
        choices = row if isinstance(row, RowFailure) else self._encoder.encode(row)
        if isinstance(choices, RowFailure):
            self._journal.done(self._failed(choices))
            return
        assert isinstance(row, Row)
        opened = _OpenRow(row, num_open=len(choices))
        # The samples of one prompt are neighbours; all but the first part from it where the prompt ends.
        first: list[Sequence] = []
        for token_ids, params in choices:
            text = self._encoder.tokenizer.stream(params.stop)
            grammar = self._encoder.grammar(row)
            sequence = Sequence(token_ids, params, self._eos_ids, text=text, grammar=grammar)
            opened.sequences.append(sequence)
            opened.texts.append(text)
            self._open[sequence] = opened
            if first and first[-1].prompt_ids == token_ids:
                first[-1].forks.append(sequence)
            else:
                first.append(sequence)
        for sequence in first:
            self._engine.add(sequence)

    def _finish(self, sequences: Iterable[Sequence]) -> None:
        """Writes the answers of all rows that a pass finished at once; a fault keeps those that came before it."""
        done: list[Done] = []
        try:
            for sequence in sequences:
                opened = self._open.pop(sequence)
                opened.num_open -= 1
                if not opened.num_open:
                    done.append(self._answered(opened))
        finally:
            self._journal.done(*done)

    def _answered(self, opened: _OpenRow) -> Done:
        row = opened.row
        broken = next((each for each in opened.sequences if each.finish_reason is FinishReason.ERROR), None)
        if broken is not None:
            return self._failed(_failure(broken, row))
        completions = [_completion(each, text) for each, text in zip(opened.sequences, opened.texts, strict=True)]
        tokens = usage(completions, row.num_samples)
        line = self._answers.answer(row, completions)
        prompt, generated = tokens["prompt_tokens"], tokens["completion_tokens"]
        return Done(row.index, False, prompt, generated, self._digest(row.index), line)

    def _failed(self, failure: RowFailure) -> Done:
        return Done(failure.index, True, 0, 0, self._digest(failure.index), self._answers.failure(failure))


def _failure(broken: Sequence, row: Row) -> RowFailure:
    if broken.grammar is not None and broken.grammar.error:
        return row.failure(ErrorCode.INVALID_JSON_SCHEMA, broken.error, "response_format")
    return row.failure(ErrorCode.NUMERICAL_ERROR, broken.error)


def _completion(sequence: Sequence, text: TextStream) -> Completion:
    text.finish()
    assert sequence.finish_reason is not None
    return Completion(
        text.text,
        tuple(sequence.output_ids),
        sequence.finish_reason,
        len(sequence.prompt_ids),
        None if sequence.params.logprobs is None else tuple(sequence.logprobs),
        cut=sequence.grammar is not None and sequence.finish_reason is FinishReason.LENGTH,
    )
