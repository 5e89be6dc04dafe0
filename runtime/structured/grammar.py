"""JSON schemas compiled for one model's vocabulary. Knows no sequence and no pass."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING

from ..text.tokenizer import Tokenizer
from .schema import SchemaError, compile_schema, first_line, parser_limits
from .state import GrammarState

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled schemas that are kept: jobs have one or a few, and a hostile one takes about 60 MB.
MAX_KEPT = 16


class Grammars:
    """Schemas compiled for one tokenizer, the most recent ones kept; one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab` is the model's: its logits may be wider than the tokenizer's vocabulary."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def start(self, schema: str) -> GrammarState:
        """The beginning of a text that follows the schema. Raises SchemaError."""
        matcher = self._compiled.get(schema)
        if matcher is None:
            matcher = self._compile(schema)
            self._compiled[schema] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(schema)
        return GrammarState(matcher.deep_copy(), -(-self._guidance_tokenizer.vocab_size // 32))

    def _compile(self, schema: str) -> LLMatcher:
        grammar = compile_schema(schema)
        from llguidance import LLMatcher

        matcher = LLMatcher(self._guidance_tokenizer, grammar, log_level=0, limits=parser_limits())
        # The first mask shows what compiling does not: a schema that no text satisfies.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise SchemaError(first_line(matcher.get_error()))
        return matcher

    @cached_property
    def _guidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        words = _Words(self._tokenizer, self._vocab)
        # Without an end token only the grammar ends a text: the id that stands in for one is beyond all logits.
        eos_ids = list(self._tokenizer.eos_token_ids) or [words.nowhere]
        return LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=eos_ids)


class _Words:
    """The vocabulary as llguidance asks for it: the bytes that each token adds to the text, as the detokenizer does."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.nowhere = max(vocab, tokenizer.num_tokens)
        self.tokens = [tokenizer.token_text(token_id).data for token_id in range(self.nowhere)] + [b""]
        # An end token among them must not pass for text in the middle of a string.
        self.special_token_ids = sorted({*tokenizer.special_ids, *tokenizer.eos_token_ids, self.nowhere})
        self.eos_token_id = next(iter(tokenizer.eos_token_ids), self.nowhere)
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("grammars without forcing make no tokens of text")
