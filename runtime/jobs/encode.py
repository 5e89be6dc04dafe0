"""From a row's prompts to token ids, and whether they fit. The one place where rows and the tokenizer meet."""

from __future__ import annotations

from ..sampling.params import SamplingParams
from ..structured.grammar import Grammars
from ..structured.schema import SchemaError
from ..structured.state import GrammarState
from ..text.errors import PromptError
from ..text.tokenizer import Tokenizer
from .codes import ErrorCode
from .context import context_error
from .response_format import invalid_schema
from .rows import ChatPrompt, Prompt, Row, RowError, TextPrompt


class RowEncoder:
    """`context` and `cache_tokens` bound what one sequence may hold; nothing is ever cut to make it fit."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, context: int, cache_tokens: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._vocab = vocab
        self._context = context
        self._cache_tokens = cache_tokens
        self._grammars = Grammars(tokenizer, vocab)

    def encode(self, row: Row) -> list[tuple[list[int], SamplingParams]] | RowError:
        """Token ids and settings of each of the row's choices, in the order of its answer."""
        try:
            self.grammar(row)
            ids_of_prompts = [self._ids(prompt) for prompt in row.prompts]
        except PromptError as error:
            return RowError(ErrorCode.INVALID_VALUE, str(error), "prompt", row.line)
        except SchemaError as error:
            fault = invalid_schema(error)
            return RowError(fault.code, fault.message, fault.param, row.line)
        for token_ids in ids_of_prompts:
            if not token_ids:
                return RowError(
                    ErrorCode.INVALID_VALUE, "the prompt has no tokens; give it some text", "prompt", row.line
                )
            if (highest := max(token_ids)) >= self._vocab:
                message = f"token id {highest} is not in the model's vocabulary of {self._vocab}"
                return RowError(ErrorCode.INVALID_VALUE, message, "prompt", row.line)
        longest = max(map(len, ids_of_prompts))
        return self._too_long(row, longest) or [(ids_of_prompts[prompt], params) for prompt, params in row.choices()]

    def grammar(self, row: Row) -> GrammarState | None:
        """The beginning of one of the row's answers, where it asks for a form. Raises SchemaError, once for a row."""
        return None if row.schema is None else self._grammars.start(row.schema)

    def _too_long(self, row: Row, longest: int) -> RowError | None:
        if error := context_error(row, longest, self._context):
            return error
        if self._cache_tokens is None or longest + row.params.max_tokens <= self._cache_tokens:
            return None
        message = (
            f"{longest} prompt tokens and {row.params.max_tokens} to generate are more than the KV cache holds "
            f"({self._cache_tokens}); give the job more memory, or lower max_tokens"
        )
        return RowError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, None, row.line)

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, ChatPrompt):
            return self.tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in prompt.messages])
        return self.tokenizer.encode(prompt.text) if isinstance(prompt, TextPrompt) else list(prompt.token_ids)
