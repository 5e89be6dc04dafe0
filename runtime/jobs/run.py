"""A job: rows in, answers out in input order, the engine kept full in between. Knows no command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..engine import Engine
from ..sampling.draw import TokenLogprob as DrawnLogprob
from ..sequence import Sequence
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from .answers import Answers
from .codes import ErrorCode
from .completion import Completion, FinishReason, TokenLogprob
from .encode import RowEncoder
from .rows import BadRow, Row, RowError
from .writer import OrderedWriter


@dataclass(slots=True)
class JobCounts:
    """Rows that were answered and that failed so far."""

    ok: int = 0
    failed: int = 0


@dataclass(slots=True)
class _OpenRow:
    """A row whose choices are being generated; `num_open` of them are not finished."""

    row: Row
    num_open: int
    sequences: list[Sequence] = field(default_factory=list)
    texts: list[TextStream] = field(default_factory=list)


class Job:
    """Runs rows through an engine; between two passes the counts, the engine's metrics and the writer are current."""

    def __init__(self, engine: Engine, encoder: RowEncoder, answers: Answers, writer: OrderedWriter) -> None:
        self.counts = JobCounts()
        self._engine = engine
        self._encoder = encoder
        self._answers = answers
        self._writer = writer
        self._eos_ids = frozenset(encoder.tokenizer.eos_token_ids)
        self._open: dict[Sequence, _OpenRow] = {}

    def run(self, rows: Iterator[Row | BadRow]) -> Iterator[JobCounts]:
        """One pass per iteration, until every row has its answer."""
        more = True
        while more or self._engine.busy:
            while more and self._engine.scheduler.hungry:
                row = next(rows, None)
                more = row is not None
                if row is not None:
                    self._start(row)
            if self._engine.busy:
                for sequence in self._engine.step():
                    self._finish(sequence)
            yield self.counts

    def _start(self, row: Row | BadRow) -> None:
        choices = row.error if isinstance(row, BadRow) else self._encoder.encode(row)
        if isinstance(choices, RowError):
            self._fail(row, choices)
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

    def _finish(self, sequence: Sequence) -> None:
        opened = self._open.pop(sequence)
        opened.num_open -= 1
        if opened.num_open:
            return
        row = opened.row
        broken = next((each for each in opened.sequences if each.finish_reason == "error"), None)
        if broken is not None:
            self._fail(row, _error(broken, row))
            return
        completions = [
            _completion(each, text, self._encoder.tokenizer)
            for each, text in zip(opened.sequences, opened.texts, strict=True)
        ]
        self._writer.add(row.index, self._answers.answer(row, completions))
        self.counts.ok += 1

    def _fail(self, row: Row | BadRow, error: RowError) -> None:
        self._writer.add(row.index, self._answers.failure(row, error), failed=True)
        self.counts.failed += 1


def _error(broken: Sequence, row: Row) -> RowError:
    if broken.grammar is not None and broken.grammar.error:
        return RowError(ErrorCode.INVALID_JSON_SCHEMA, broken.error, "response_format", row.line)
    return RowError(ErrorCode.NUMERICAL_ERROR, broken.error, None, row.line)


def _completion(sequence: Sequence, text: TextStream, tokenizer: Tokenizer) -> Completion:
    text.finish()
    logprobs = None
    if sequence.params.logprobs is not None:
        logprobs = tuple(_logprob(drawn, tokenizer) for drawn in sequence.logprobs)
    return Completion(
        text.text,
        tuple(sequence.output_ids),
        FinishReason(sequence.finish_reason),
        len(sequence.prompt_ids),
        logprobs,
        cut=sequence.grammar is not None and sequence.finish_reason == "length",
    )


def _logprob(drawn: DrawnLogprob, tokenizer: Tokenizer) -> TokenLogprob:
    top = tuple(_shown(token_id, logprob, tokenizer) for token_id, logprob in drawn.top)
    text, data = tokenizer.token_text(drawn.token_id)
    return TokenLogprob(text, drawn.logprob, data, top)


def _shown(token_id: int, logprob: float, tokenizer: Tokenizer) -> TokenLogprob:
    text, data = tokenizer.token_text(token_id)
    return TokenLogprob(text, logprob, data)
