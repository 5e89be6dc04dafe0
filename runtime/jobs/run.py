"""A job's passes: rows from their source into the engine, answers into the journal; and `RowReader`, for whoever serves
a loaded model to rows that come one by one. Knows no command line.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import astuple, dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any, Protocol, Self

from ..engine.engine import Engine
from ..engine.sequence import Sequence
from ..loading.engine_loader import LoadedModel
from ..rows.answer_formats import SCORED, Answers, Completion, openai_body, openai_logprobs, response_body, usage
from ..rows.fields import invalid_schema
from ..rows.reader import RowFile
from ..rows.row import CONTINUE_CUT, Defaults, Endpoint, ErrorCode, Row, RowFailure
from ..rows.row_formats import RowBuilder, RowPosition
from ..sampling.model_defaults import model_defaults
from ..sampling.params import FinishReason, TokenLogprob
from ..text.chat_stream import ChatStream
from ..text.messages import FunctionCall, split_calls
from ..text.stream import TextStream
from ..text.tokenizer import Tokenizer
from .encode import Choices, KnownIds, RowEncoder
from .journal.journal import EarlierRuns
from .journal.state import CutChoice, Done, JobState

# Rows that go into work with one record of the journal.
_ADMITTED_TOGETHER = 16
# Between two records of what rows in work have generated: what a power cut may cost. A stop on purpose costs nothing.
PROGRESS_SECONDS = 60.0


class RowSource(Protocol):
    """The source of rows of a running job."""

    @property
    def exhausted(self) -> bool:
        """Whether no more rows will come. Until then, `take` is called between passes."""

    def take(self, most: int, alone: bool) -> Items[Row | RowFailure]:
        """Up to `most` rows to start now, in the order in which they are to run; none where none may start yet.

        `alone` says that nothing is in work, so a row that must run with no other may start.
        """

    def digest(self, row: int) -> str:
        """16 hex digits that identify the line of a row."""

    def partial(self, row: int) -> Items[CutChoice]:
        """What earlier runs generated for each choice of a row; empty for one that starts anew."""

    def answered(self, row: int) -> bool:
        """Whether a row has an answer already, which was cut and is continued."""


class FileRows:
    """The rows of an input file that are to be run, in waves.

    Each wave is finished before the next begins, because a process that dies in one was killed by a row of it: rows
    that cannot be run, then every suspect by itself, then all others together.
    """

    def __init__(
        self,
        state: JobState,
        file: RowFile,
        rows: Items[int],
        failed: Iterable[RowFailure] = (),
        earlier: EarlierRuns | None = None,
    ) -> None:
        """`rows` are numbers of rows that can be run, in their order; `failed` are the rows that cannot; `earlier` has
        what rows generated before."""
        self._state = state
        self._file = file
        self._earlier = earlier or EarlierRuns()
        self._waves = self._all_waves(rows, failed)
        self._wave: Iterator[Row | RowFailure] = iter(())
        self.exhausted = False

    def take(self, most: int, alone: bool) -> Items[Row | RowFailure]:
        while not (taken := list(islice(self._wave, most))) and alone and not self.exhausted:
            wave = next(self._waves, None)
            self._wave, self.exhausted = (iter(()), True) if wave is None else (wave, False)
        return taken

    def digest(self, row: int) -> str:
        return self._file.index.digest(row)

    def partial(self, row: int) -> Items[CutChoice]:
        return self._earlier.choices(row)

    def answered(self, row: int) -> bool:
        return self._state.cut_offset(row) is not None

    def _all_waves(self, rows: Items[int], failed: Iterable[RowFailure]) -> Iterator[Iterator[Row | RowFailure]]:
        yield iter(failed)
        # Taken once: rows leave the suspects as they are answered.
        isolated = {row for row, suspicion in self._state.suspects.items() if suspicion.isolated}
        for row in rows if isolated else ():
            if row in isolated:
                yield map(self._suspect, [row])
        yield (self._earlier.longer(self._file.row(row)) for row in rows if row not in isolated)

    def _suspect(self, row: int) -> Row | RowFailure:
        read, suspicion = self._file.row(row), self._state.suspects[row]
        if not suspicion.condemned:
            return self._earlier.longer(read)
        return read.failure(ErrorCode.WORKER_CRASHED, f"{suspicion}; it is not run again")


# A text to continue has no parts, and neither has a chat answer whose model has no known marks.
AnswerText = TextStream | ChatStream


@dataclass(slots=True)
class OpenRow:
    """A row whose choices are being generated; `num_open` of them are not finished.

    `first` are the sequences to add to an engine: the others are their forks, or whole since an earlier run.
    `num_recorded` tokens of each choice are in the journal.
    """

    row: Row
    num_open: int
    sequences: list[Sequence] = field(default_factory=list)
    texts: list[AnswerText] = field(default_factory=list)
    first: list[Sequence] = field(default_factory=list)
    num_recorded: list[int] = field(default_factory=list)

    @classmethod
    def start(cls, row: Row, choices: Choices, encoder: RowEncoder, before: Items[CutChoice] = ()) -> Self:
        """The samples of one prompt are neighbours; all but the first leave it where the prompt ends.

        `before` is what earlier runs generated for its choices; each goes on by itself behind it.
        """
        opened, eos_ids = cls(row, num_open=len(choices)), encoder.eos_ids(row)
        for token_ids, params in choices:
            text = encoder.text(row, token_ids, params)
            parts = text if isinstance(text, ChatStream) else None
            sequence = Sequence(token_ids, params, eos_ids, text=text, grammar=encoder.grammar(row), parts=parts)
            opened.sequences.append(sequence)
            opened.texts.append(text)
        opened._continue(before) if before else opened._share()
        opened.num_recorded = [len(each.output_ids) for each in opened.sequences]
        return opened

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache; a prompt counts once, as in `usage`."""
        prompts = self.sequences[:1] if self.row.scored else self.sequences[:: self.row.num_samples]
        return sum(each.num_cached for each in prompts)

    def take(self, index: int) -> tuple[str, str]:
        """The reasoning and the content of one choice that were not taken before and do not change any more."""
        text = self.texts[index]
        if self.sequences[index].finished:
            text.finish()
        return ("", text.take()) if isinstance(text, TextStream) else text.take_parts()

    def progress(self) -> list[CutChoice]:
        """What its choices have generated since this was called before; empty where that is nothing."""
        begins, self.num_recorded = self.num_recorded, [len(each.output_ids) for each in self.sequences]
        if begins == self.num_recorded:
            return []
        return [_generated(each, begin) for each, begin in zip(self.sequences, begins, strict=True)]

    def completions(self) -> list[Completion] | RowFailure:
        """The answers of the finished choices, split into their parts; or why one of them has ended with an error."""
        broken = next((each for each in self.sequences if each.finish_reason is FinishReason.ERROR), None)
        if broken is not None:
            return _failure_of(broken, self.row)
        return [completion_of(self.row, each, text) for each, text in zip(self.sequences, self.texts, strict=True)]

    def _share(self) -> None:
        for sequence in self.sequences:
            if self.first and self.first[-1].prompt_ids == sequence.prompt_ids:
                self.first[-1].forks.append(sequence)
                sequence.prompt_logprobs = self.first[-1].prompt_logprobs
            else:
                self.first.append(sequence)

    def _continue(self, before: Items[CutChoice]) -> None:
        for sequence, generated in zip(self.sequences, before, strict=True):
            sequence.replay(generated.token_ids, map(_logprob, generated.logprobs))
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.tokens += map(_logprob, generated.prompt_logprobs)
        self.first = [each for each in self.sequences if not each.finished]
        self.num_open = len(self.first)


class AnswerLog(Protocol):
    """What records rows that begin, and answers: a journal, or whoever passes them on to one."""

    def begin(self, rows: Iterable[int]) -> None: ...

    def progress(self, rows: Mapping[int, Items[CutChoice]]) -> None: ...

    def done(self, *rows: Done) -> None: ...


class RowRunner:
    """Runs rows through an engine; between two passes the engine's metrics and the journal are current.

    Sequences that are none of its rows may run beside them: who added those finishes them.
    """

    def __init__(
        self, engine: Engine, encoder: RowEncoder, answers: Answers, journal: AnswerLog, source: RowSource
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._answers = answers
        self._journal = journal
        self._source = source
        self._open: dict[Sequence, OpenRow] = {}

    @classmethod
    def of(
        cls, model: LoadedModel, tokenizer: Tokenizer, named: tuple[str, datetime], journal: AnswerLog,
        source: RowSource, spool: KnownIds,
    ) -> Self:  # fmt: skip
        """On the engine of `model`; `named` are the name of the model and the job's begin, which answers carry, and
        `tokenizer` has that date, too."""
        shape, (name, created) = model.source.shape, named
        encoder = RowEncoder(tokenizer, shape.vocab, shape.context, model.longest, spool=spool)
        answers = Answers(name, int(created.timestamp()), tokenizer.token_text)
        return cls(model.engine.engine, encoder, answers, journal, source)

    @property
    def open_rows(self) -> set[int]:
        """Rows that are being computed."""
        return {opened.row.index for opened in self._open.values()}

    def drop(self, rows: Collection[int]) -> None:
        """Between two passes: these rows get no answer from here."""
        dropped = {sequence for sequence, opened in self._open.items() if opened.row.index in rows}
        self._engine.abort(lambda sequence: sequence in dropped)
        self._open = {sequence: opened for sequence, opened in self._open.items() if sequence not in dropped}

    def passes(self) -> Iterator[None]:
        """One pass per iteration, until every row of the source has its answer.

        What rows in work have generated is recorded every PROGRESS_SECONDS, and when the passes are closed.
        """
        engine, source, recorded = self._engine, self._source, time.monotonic()
        while not source.exhausted or self._open:
            while engine.scheduler.has_capacity and (rows := source.take(_ADMITTED_TOGETHER, alone=not self._open)):
                self._admit(rows)
            if self._open:
                self._finish(engine.step())
            if time.monotonic() - recorded >= PROGRESS_SECONDS:
                self._record_progress()
                recorded = time.monotonic()
            try:
                yield
            except GeneratorExit:
                self._record_progress()
                raise

    def _record_progress(self) -> None:
        opened = {each.row.index: each for each in self._open.values()}
        self._journal.progress({row: choices for row, each in opened.items() if (choices := each.progress())})

    def _admit(self, rows: Items[Row | RowFailure]) -> None:
        runnable = [row.index for row in rows if isinstance(row, Row)]
        if runnable:
            # Before anything touches the row's text: whatever it does to this process, its successor knows of it.
            self._journal.begin(runnable)
        for row in rows:
            self._start(row)

    def _start(self, row: Row | RowFailure) -> None:
        choices = row if isinstance(row, RowFailure) else self._encoder.encode(row)
        before = () if isinstance(row, RowFailure) else self._source.partial(row.index)
        if isinstance(choices, RowFailure):
            # A cut answer that cannot grow stays as it is.
            if isinstance(row, RowFailure) or not self._source.answered(row.index):
                self._journal.done(self._failed(choices))
            return
        assert isinstance(row, Row)
        opened = OpenRow.start(row, choices, self._encoder, before)
        self._open |= dict.fromkeys((each for each in opened.sequences if not each.finished), opened)
        for sequence in opened.first:
            self._engine.add(sequence)
        if not opened.num_open:
            self._journal.done(self._answered(opened))

    def _finish(self, sequences: Iterable[Sequence]) -> None:
        """Writes the answers of all rows that a pass finished at once; a fault keeps those that came before it."""
        done: list[Done] = []
        try:
            for sequence in sequences:
                if (opened := self._open.pop(sequence, None)) is None:
                    continue
                opened.num_open -= 1
                if not opened.num_open:
                    done.append(self._answered(opened))
        finally:
            self._journal.done(*done)

    def _answered(self, opened: OpenRow) -> Done:
        row = opened.row
        completions = opened.completions()
        if isinstance(completions, RowFailure):
            return self._failed(completions)
        scored = bool(row.scored)
        ends = Counter(SCORED if scored else str(each.finish_reason) for each in completions)
        cut = min((len(each.token_ids) for each in completions if each.finish_reason is FinishReason.LENGTH), default=0)
        cut = 0 if scored else cut
        if cut and row.schema is not None:
            done = self._failed(_incomplete(row, completions))
        else:
            line = self._answers.answer(row, completions)
            done = Done(row.index, False, 0, 0, self._source.digest(row.index), line, ends)
        tokens = usage(row, completions)
        return replace(
            done,
            prompt_tokens=tokens["prompt_tokens"],
            generated_tokens=tokens["completion_tokens"],
            cut=cut,
            choices=tuple(map(_choice, completions)) if cut else (),
            cached_tokens=opened.cached_tokens,
            reasoning_tokens=sum(each.reasoning_tokens or 0 for each in completions),
        )

    def _failed(self, failure: RowFailure) -> Done:
        return failed_row(failure, self._answers, self._source.digest(failure.index))


def failed_row(failure: RowFailure, answers: Answers, digest: str) -> Done:
    """The record of a row that has an error; `digest` identifies its line."""
    return Done(failure.index, True, 0, 0, digest, answers.failure(failure), {str(failure.code): 1})


def _failure_of(broken: Sequence, row: Row) -> RowFailure:
    """Why a sequence of a row has ended with an error."""
    if broken.grammar is not None and broken.grammar.error and row.schema is not None:
        found = invalid_schema(row.schema, broken.error).failure
        return row.failure(found.code, broken.error, found.param)
    return row.failure(ErrorCode.NUMERICAL_ERROR, broken.error)


def completion_of(row: Row, sequence: Sequence, text: AnswerText) -> Completion:
    """The answer of a finished sequence, split into its parts."""
    text.finish()
    assert sequence.finish_reason is not None
    completion = Completion(
        text.text,
        tuple(sequence.output_ids),
        sequence.finish_reason,
        len(sequence.prompt_ids),
        None if sequence.params.logprobs is None else tuple(sequence.logprobs),
        prompt_logprobs=None if sequence.prompt_logprobs is None else tuple(sequence.prompt_logprobs.tokens),
    )
    calls: Items[FunctionCall] = ()
    if isinstance(text, ChatStream):
        reasoning, counted, calls = text.reasoning, text.reasoning_tokens, text.calls
        completion = replace(completion, reasoning=reasoning, reasoning_tokens=counted, answered=text.answered)
    # A call of an answer that was cut may be cut too.
    if row.tools and sequence.finish_reason is FinishReason.STOP:
        return _with_calls(completion, calls)
    if not calls:
        return completion
    return replace(completion, text=completion.text + "".join(call.arguments for call in calls), answered=True)


def _with_calls(completion: Completion, calls: Items[FunctionCall]) -> Completion:
    """The calls that the answer's format marks, else those that its text holds."""
    content = completion.text
    if not calls:
        content, calls = split_calls(content)
    if not calls:
        return completion
    return replace(completion, text=content, finish_reason=FinishReason.TOOL_CALLS, calls=tuple(calls))


def _incomplete(row: Row, completions: Items[Completion]) -> RowFailure:
    most = f"{row.endpoint.called('max_tokens')} ({row.params.max_tokens})"
    message = f"the answer reached {most} before it was complete; {CONTINUE_CUT}"
    failure = row.failure(ErrorCode.INCOMPLETE_OUTPUT, message, "max_tokens")
    return replace(failure, partial=tuple(each.text for each in completions))


def _choice(completion: Completion) -> CutChoice:
    return CutChoice(completion.token_ids, _plain(completion.logprobs), _plain(completion.prompt_logprobs))


def _generated(sequence: Sequence, begin: int) -> CutChoice:
    """What a sequence has generated from its token `begin` on; what it says of its prompt comes with its first one."""
    scored = sequence.prompt_logprobs
    of_prompt = scored.tokens if scored is not None and sequence.output_ids and not begin else ()
    return CutChoice(sequence.output_ids[begin:], _plain(sequence.logprobs[begin:]), _plain(of_prompt))


def _plain(logprobs: Items[TokenLogprob] | None) -> list[Any]:
    return [astuple(each) for each in logprobs or ()]


def _logprob(fields: Items[Any]) -> TokenLogprob:
    token_id, logprob, rank, top = fields
    return TokenLogprob(token_id, logprob, rank, tuple((each, value) for each, value in top))


class RowReader:
    """Bodies of OpenAI's API to rows, rows to sequences, and finished sequences to answers."""

    def __init__(self, loaded: LoadedModel, model: str, seed: int) -> None:
        """`model` is the name that answers carry, `seed` is for rows that do not say."""
        shape = loaded.source.shape
        self._model = model
        self._longest = loaded.longest
        self._tokenizer = loaded.tokenizer
        self._encoder = RowEncoder(self._tokenizer, shape.vocab, shape.context, self._longest, most=self._longest)
        self._builder = RowBuilder(Defaults(seed=seed, **model_defaults(loaded.source.folder).values))

    def row(self, body: Mapping[str, Any], endpoint: Endpoint, row_id: str) -> Row:
        """Raises InvalidRow."""
        return self._builder.build(body, endpoint, RowPosition(0, 1, row_id))

    def open(self, row: Row, most: int | None = None) -> OpenRow | RowFailure:
        """The row's sequences, for an engine; one thread at a time. Raises TokenizerError.

        With `most`, answers may have so many tokens, as far as they fit, where the row's max_tokens are fewer.
        """
        choices = self._encoder.encode(row)
        if isinstance(choices, RowFailure):
            return choices
        if most is not None:
            left = self._longest - max(len(token_ids) for token_ids, _ in choices)
            most = max(row.params.max_tokens, min(most, left))
            choices = [(token_ids, replace(params, max_tokens=most)) for token_ids, params in choices]
        return OpenRow.start(row, choices, self._encoder)

    def logprobs(self, row: Row, tokens: Items[TokenLogprob], before: int) -> dict[str, Any]:
        """Those of a part of an answer, as a stream has them, behind `before` characters of tokens."""
        return openai_logprobs(row, tokens, self._tokenizer.token_text, before)

    def answer(self, opened: OpenRow, created: int) -> dict[str, Any] | RowFailure:
        """The body of OpenAI's response once all sequences are finished; `created` is the second since 1970."""
        completions = opened.completions()
        if isinstance(completions, RowFailure):
            return completions
        body = openai_body(opened.row, completions, self._model, created, self._tokenizer.token_text)
        details = "input_tokens_details" if opened.row.endpoint is Endpoint.RESPONSE else "prompt_tokens_details"
        body["usage"][details] = body["usage"].get(details, {}) | {"cached_tokens": opened.cached_tokens}
        return body

    def begun(self, row: Row, created: int) -> dict[str, Any]:
        """A body of the Responses API before anything is answered."""
        return response_body(row, None, self._model, created, self._tokenizer.token_text)
