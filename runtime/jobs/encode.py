"""Tokenizes rows, and computes the size of a job: its tokens, its longest rows, and the fastest order.

A row is tokenized once. It is measured before anything is loaded, because what is too long, and how much memory the
KV cache takes, must be known by then; its token ids wait in a file until it runs (`TokenSpool`). Its line is parsed
three times: by the check of the whole input, which refuses a malformed one before the model is even opened, when it is
measured, and when it runs. Rows as objects would take kilobytes of memory each, and a line has to be read again in any
case, to notice that it changed.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import numpy as np

from ..plan.placement import Workload
from ..rows.fields import invalid_schema
from ..rows.preflight import Preflight, located
from ..rows.row import ChatPrompt, ErrorCode, Prompt, Row, RowFailure, TextPrompt, common_error
from ..sampling.grammar import ForcedCall, Grammars, GrammarState, SchemaError
from ..sampling.params import SequenceSampling
from ..settings.errors import InputRefused, PromptError, counted
from ..text.chat_stream import ChatStream, StreamOptions
from ..text.stream import TextStream
from ..text.template import strings
from ..text.tokenizer import Tokenizer
from .order import SpeedOrder

# Token ids and settings of each of a row's choices, in the order of its answer.
Choices = Sequence[tuple[list[int], SequenceSampling]]


def prompt_texts(prompt: Prompt) -> Iterator[str]:
    """Every text of a prompt that people wrote; nothing of one that is token ids."""
    if isinstance(prompt, TextPrompt):
        yield prompt.text
    elif isinstance(prompt, ChatPrompt):
        yield from strings([each["content"] for each in prompt.messages])


def context_error(row: Row, num_prompt_tokens: int, context_tokens: int, least: str = "") -> RowFailure | None:
    """The failure of a row whose longest prompt and its answer together exceed the context."""
    max_tokens = row.params.max_tokens
    if num_prompt_tokens + max_tokens <= context_tokens:
        return None
    message = (
        f"{least}{num_prompt_tokens} prompt tokens and {max_tokens} to generate are {num_prompt_tokens + max_tokens},"
        f" the context has {context_tokens}; shorten the prompt or lower {row.endpoint.called('max_tokens')}"
    )
    return row.failure(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)


class TokenSpool:
    """Token ids of the prompts of rows, in a file without a name: 4 bytes a token on disk, 8 bytes a row in memory.

    Where the disk is full, rows that are not in it are tokenized again.
    """

    def __init__(self, folder: Path, num_rows: int) -> None:
        # Buffered, because most rows are small: one write for each would cost as much as tokenizing it.
        self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=1 << 20))  # noqa: SIM115
        self._ends = array("Q", bytes(8 * num_rows))
        self._end = 0
        self._full = False

    def add(self, row: int, ids_of_prompts: Sequence[Sequence[int]]) -> None:
        if self._full:
            return
        lengths = array("I", [len(ids_of_prompts), *map(len, ids_of_prompts)])
        data = b"".join(array("I", ids).tobytes() for ids in ids_of_prompts)
        try:
            self._file.write(lengths.tobytes() + data)
        except OSError:
            self._full = True
            return
        # One more than where it begins: 0 is a row that is not here.
        self._ends[row] = self._end + 1
        self._end += 4 * len(lengths) + len(data)

    def seal(self) -> None:
        """Rows can be read from here on, and no more are added."""
        self._full = True
        try:
            self._file.flush()
        except OSError:
            self._ends = array("Q", bytes(8 * len(self._ends)))

    def token_ids(self, row: int) -> list[list[int]] | None:
        """The ids of each prompt of a row; None where they have to be computed, as for rows that came later."""
        if row >= len(self._ends) or not self._ends[row]:
            return None
        begin = self._ends[row] - 1
        (count,) = self._read(begin, 1)
        lengths = self._read(begin + 4, count)
        ids = self._read(begin + 4 + 4 * count, sum(lengths))
        ends = np.cumsum(lengths).tolist()
        return [list(ids[end - length : end]) for length, end in zip(lengths, ends, strict=True)]

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _read(self, begin: int, count: int) -> array[int]:
        return array("I", os.pread(self._file.fileno(), 4 * count, begin))


class KnownIds(Protocol):
    """Token ids of the prompts of rows that were computed before."""

    def token_ids(self, row: int) -> list[list[int]] | None: ...

    def add(self, row: int, ids_of_prompts: Sequence[Sequence[int]]) -> None: ...


class RowEncoder:
    """`context` and `cache_tokens` bound what one sequence may hold; nothing is ever cut to make it fit."""

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, context: int, cache_tokens: int | None = None, *,
        spool: KnownIds | None = None, most: int | None = None,
    ) -> None:  # fmt: skip
        """`spool` keeps token ids that were computed, and gives those that it has. Far longer prompts than of `most`
        tokens, of `context` by default, are not tokenized to their end."""
        self._most = most or context
        self.tokenizer = tokenizer
        self._vocab = vocab
        self._context = context
        self._cache_tokens = cache_tokens
        self._spool = spool
        self._grammars = Grammars(tokenizer, vocab)
        self._eos_ids = frozenset(tokenizer.eos_token_ids)
        self._chat_eos_ids = self._eos_ids | tokenizer.chat_stop_ids
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What rows ask for and this model does not do, each said once."""
        return tuple(self._notes)

    def encode(self, row: Row) -> Choices | RowFailure:
        """The generations of a row, or the failure that prevents them."""
        if isinstance(row.schema, ForcedCall) and not self.tokenizer.writes_json_calls:
            message = "how this model writes calls of functions is not known, so none can be forced; use auto"
            return row.failure(ErrorCode.UNSUPPORTED_PARAMETER, message, "tool_choice")
        try:
            self.grammar(row)
            if failure := self._far_too_long(row):
                return failure
            ids_of_prompts = self._ids_of_prompts(row)
        except PromptError as error:
            return row.failure(ErrorCode.INVALID_VALUE, str(error), "prompt")
        except SchemaError as error:
            assert row.schema is not None
            found = invalid_schema(row.schema, error).failure
            return row.failure(found.code, found.message, found.param)
        if (bias := row.params.logit_bias) and bias[-1][0] >= self._vocab:
            message = f"token id {bias[-1][0]} of logit_bias is not in the model's vocabulary of {self._vocab}"
            return row.failure(ErrorCode.INVALID_VALUE, message, "logit_bias")
        self._note(row)
        for token_ids in ids_of_prompts:
            if not token_ids:
                return row.failure(ErrorCode.INVALID_VALUE, "the prompt has no tokens; give it some text", "prompt")
            if (highest := max(token_ids)) >= self._vocab:
                message = f"token id {highest} is not in the model's vocabulary of {self._vocab}"
                return row.failure(ErrorCode.INVALID_VALUE, message, "prompt")
        if row.scored:
            choices = [self._scored(row, ids_of_prompts[0], choice) for choice in row.scored]
        else:
            choices = [(ids_of_prompts[prompt], params) for prompt, params in row.choices()]
        return self._too_long(row, max(len(token_ids) for token_ids, _ in choices)) or choices

    def _scored(self, row: Row, prompt_ids: list[int], choice: str) -> tuple[list[int], SequenceSampling]:
        """A prompt with one of the answers that are scored, and where it begins: a text is tokenized together with its
        answer, to a conversation and to token ids the answer's own tokens are appended."""
        prompt, start = row.prompts[0], len(prompt_ids)
        if isinstance(prompt, TextPrompt):
            whole = self.tokenizer.encode(prompt.text + choice)
            same = [one == other for one, other in zip(whole, prompt_ids, strict=False)]
            start = [*same, False].index(False)
        else:
            whole = [*prompt_ids, *self.tokenizer.encode_verbatim(choice, add_special_tokens=False)]
        return whole, replace(row.params, prompt_logprobs=0, logprob_start_len=max(1, start))

    def grammar(self, row: Row) -> GrammarState | None:
        """The beginning of one of the row's answers, where it asks for a form. Raises SchemaError, once for a row."""
        return None if row.schema is None else self._grammars.start(row.schema)

    def text(self, row: Row, prompt_ids: Sequence[int], params: SequenceSampling) -> TextStream | ChatStream:
        """The beginning of one of the row's answers; that of a chat is split into its parts where they are known."""
        if row.chat:
            options = StreamOptions(params.stop, params.min_tokens, params.max_thinking_tokens)
            if (stream := self.tokenizer.chat_stream(prompt_ids, options)) is not None:
                return stream
        return self.tokenizer.stream(params.stop, min_tokens=params.min_tokens)

    def eos_ids(self, row: Row) -> frozenset[int]:
        """The tokens that end an answer to the row."""
        return self._chat_eos_ids if row.chat else self._eos_ids

    def _note(self, row: Row) -> None:
        prompt, tokenizer = row.prompts[0], self.tokenizer
        if not isinstance(prompt, ChatPrompt):
            return
        for name in prompt.variables:
            if not tokenizer.template_reads(name):
                self._notes[f"the model's chat template does not use {name}"] = None
        if row.params.max_thinking_tokens is not None and tokenizer.answer_format is None:
            self._notes["max_thinking_tokens has no effect: the model has no known marks of reasoning"] = None
        if prompt.tools and not tokenizer.marks_calls:
            self._notes["calls of tools stay in the content: how this model marks them is not known"] = None

    def _ids_of_prompts(self, row: Row) -> list[list[int]]:
        known = None if self._spool is None else self._spool.token_ids(row.index)
        if known is not None:
            return known
        ids_of_prompts = [self.token_ids(prompt) for prompt in row.prompts]
        if self._spool is not None:
            self._spool.add(row.index, ids_of_prompts)
        return ids_of_prompts

    def _far_too_long(self, row: Row) -> RowFailure | None:
        """The failure of a row that need not be tokenized to the end: it would take far more memory than it runs in."""
        counts = [self.tokenizer.at_least(prompt_texts(prompt), self._most) for prompt in row.prompts]
        return self._too_long(row, max(counts), "at least ") if max(counts) > self._most else None

    def _too_long(self, row: Row, longest: int, least: str = "") -> RowFailure | None:
        """`least` is in front of a number that was not counted to the end."""
        if failure := context_error(row, longest, self._context, least):
            return failure
        if self._cache_tokens is None or longest + row.params.max_tokens <= self._cache_tokens:
            return None
        message = (
            f"{least}{longest} prompt tokens and {row.params.max_tokens} to generate are more than the KV cache holds "
            f"({self._cache_tokens}); give the job more memory (an LLM: a larger max_model_len), or lower "
            f"{row.endpoint.called('max_tokens')}"
        )
        return row.failure(ErrorCode.KV_CACHE_EXCEEDED, message)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Raises PromptError, TokenizerError."""
        if isinstance(prompt, ChatPrompt):
            return self.tokenizer.encode_chat(prompt.messages, prompt.tools, prompt.variables)
        return self.tokenizer.encode(prompt.text) if isinstance(prompt, TextPrompt) else list(prompt.token_ids)


_FIRST = 1 << 62


@dataclass(slots=True)
class JobSize:
    """Tokens of all prompts, the most that can be generated, and how long the sequences may become."""

    rows: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    max_generated_tokens: int = 0
    too_long: int = 0
    # Rows by the tokens that their longest sequence may come to.
    lengths: Counter[int] = field(default_factory=Counter)
    # Errors by code, and the first of each.
    codes: Counter[ErrorCode] = field(default_factory=Counter)
    failures: dict[ErrorCode, RowFailure] = field(default_factory=dict)

    def refuse_most(self, found: Preflight, lenient: bool) -> None:
        """Raises InputRefused where most rows have the same error, as `found` does for those that it sees."""
        code = None if lenient else common_error(self.codes, self.rows)
        if code is not None:
            raise InputRefused(
                f"{found.path}: nothing was run: {self.codes[code]:,} of {counted(self.rows, 'row')} have the error "
                f"{code}; the first is {located(self.failures[code], found.unit)}. "
                "Fix the rows, or pass --lenient to answer the others"
            )

    def refuse_if_none_runs(self, found: Preflight) -> None:
        """Raises InputRefused where there is nothing to plan."""
        if found.file_problems.total:
            raise InputRefused(found.report())
        if not self.lengths:
            first = "; ".join(located(each, found.unit) for each in self.failures.values())
            raise InputRefused(f"{found.path}: none of {counted(self.rows, 'row')} can run: {first}")

    def add(self, choices: Choices | RowFailure) -> int:
        """Returns the most tokens that one of the choices may come to; 0 for a row that will not run."""
        self.rows += 1
        if isinstance(choices, RowFailure):
            self.too_long += choices.code == "context_length_exceeded"
            self.codes[choices.code] += 1
            self.failures.setdefault(choices.code, choices)
            return 0
        self.sequences += len(choices)
        self.prompt_tokens += sum(len(token_ids) for token_ids, _ in choices)
        self.max_generated_tokens += sum(params.max_tokens for _, params in choices)
        longest = max(len(token_ids) + params.max_tokens for token_ids, params in choices)
        self.lengths[longest] += 1
        return longest

    def longer_than(self, num_tokens: int) -> int:
        """Rows with a sequence that may come to more."""
        return sum(count for length, count in self.lengths.items() if length > num_tokens)

    def shape(self) -> Workload:
        if not self.lengths:
            return Workload(1, 2)
        return Workload(
            self.sequences, max(self.lengths), min(self.lengths), self.prompt_tokens, self.max_generated_tokens
        )


def measure(rows: Iterable[Row | RowFailure], encoder: RowEncoder, mixture: bool = False) -> tuple[JobSize, SpeedOrder]:
    """Rows that will not run come first in the order: their errors need no pass."""
    size, order = JobSize(), SpeedOrder(mixture)
    for row in rows:
        choices = row if isinstance(row, RowFailure) else encoder.encode(row)
        longest = size.add(choices)
        order.add(row.index, () if isinstance(choices, RowFailure) else choices[0][0], longest or _FIRST)
    return size, order
