"""From a row's prompts to token ids, and whether they fit. The one place where rows and the tokenizer meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..plan.plan import Workload
from ..rows.failure import ErrorCode, RowFailure
from ..rows.response_format import invalid_schema
from ..rows.row import ChatPrompt, Prompt, Row, TextPrompt
from ..sampling.grammar import Grammars, GrammarState, SchemaError
from ..sampling.params import SamplingParams
from ..settings.errors import PromptError
from ..text.tokenizer import Tokenizer
from .order import SpeedOrder


def context_error(row: Row, num_prompt_tokens: int, context_tokens: int) -> RowFailure | None:
    """The error of a row whose longest prompt and its answer together exceed the context."""
    max_tokens = row.params.max_tokens
    if num_prompt_tokens + max_tokens <= context_tokens:
        return None
    message = (
        f"{num_prompt_tokens} prompt tokens and {max_tokens} to generate are {num_prompt_tokens + max_tokens},"
        f" the context has {context_tokens}; shorten the prompt or lower max_tokens"
    )
    return row.failure(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)


class RowEncoder:
    """`context` and `cache_tokens` bound what one sequence may hold; nothing is ever cut to make it fit."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, context: int, cache_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._vocab = vocab
        self._context = context
        self._cache_tokens = cache_tokens
        self._grammars = Grammars(tokenizer, vocab)

    def encode(self, row: Row) -> list[tuple[list[int], SamplingParams]] | RowFailure:
        """Token ids and settings of each of the row's choices, in the order of its answer."""
        try:
            self.grammar(row)
            ids_of_prompts = [self._ids(prompt) for prompt in row.prompts]
        except PromptError as error:
            return row.failure(ErrorCode.INVALID_VALUE, str(error), "prompt")
        except SchemaError as error:
            found = invalid_schema(error).failure
            return row.failure(found.code, found.message, found.param)
        for token_ids in ids_of_prompts:
            if not token_ids:
                return row.failure(ErrorCode.INVALID_VALUE, "the prompt has no tokens; give it some text", "prompt")
            if (highest := max(token_ids)) >= self._vocab:
                message = f"token id {highest} is not in the model's vocabulary of {self._vocab}"
                return row.failure(ErrorCode.INVALID_VALUE, message, "prompt")
        longest = max(map(len, ids_of_prompts))
        return self._too_long(row, longest) or [(ids_of_prompts[prompt], params) for prompt, params in row.choices()]

    def grammar(self, row: Row) -> GrammarState | None:
        """The beginning of one of the row's answers, where it asks for a form. Raises SchemaError, once for a row."""
        return None if row.schema is None else self._grammars.start(row.schema)

    def _too_long(self, row: Row, longest: int) -> RowFailure | None:
        if error := context_error(row, longest, self._context):
            return error
        if self._cache_tokens is None or longest + row.params.max_tokens <= self._cache_tokens:
            return None
        message = (
            f"{longest} prompt tokens and {row.params.max_tokens} to generate are more than the KV cache holds "
            f"({self._cache_tokens}); give the job more memory, or lower max_tokens"
        )
        return row.failure(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, ChatPrompt):
            return self.tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in prompt.messages])
        return self.tokenizer.encode(prompt.text) if isinstance(prompt, TextPrompt) else list(prompt.token_ids)


Choices = Sequence[tuple[list[int], SamplingParams]]
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

    def add(self, choices: Choices | RowFailure) -> int:
        """Returns the most tokens that one of the choices may come to; 0 for a row that will not run."""
        self.rows += 1
        if isinstance(choices, RowFailure):
            self.too_long += choices.code == "context_length_exceeded"
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


def measure(rows: Iterable[Row | RowFailure], encoder: RowEncoder) -> tuple[JobSize, SpeedOrder]:
    """Rows that will not run come first in the order: their errors need no pass."""
    size, order = JobSize(), SpeedOrder()
    for row in rows:
        choices = row if isinstance(row, RowFailure) else encoder.encode(row)
        longest = size.add(choices)
        order.add(row.index, () if isinstance(choices, RowFailure) else choices[0][0], longest or _FIRST)
    return size, order
