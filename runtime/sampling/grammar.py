"""Compiles JSON schemas and other grammars for one model's vocabulary, and follows them token by token.

Knows no sequence and no pass.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from ...offload.errors import ExitCode, MoedgeError
from ..settings.errors import MissingExtra

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from ..text.tokenizer import Tokenizer

MAX_SCHEMA_NBYTES = 128 << 10
# The schema of a row that wants an object and gives no schema.
ANY_OBJECT = '{"type":"object"}'

# Where only one text may follow, llguidance would force its tokenizer's tokens of that text; without forcing the model
# may choose any tokens that spell it.
_HEADER = '%llguidance {"no_forcing": true}\n'
# They override options in the schema itself: no row may switch checks off. One space is allowed between two tokens of
# JSON, so that no model can generate blanks until its tokens end.
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": "[ ]", "coerce_one_of": False, "lenient": False}

# A regex or a grammar is written by a person. Rules that double each other would grow to seconds of work within the
# limits for schemas.
MAX_GRAMMAR_LENGTH = 32 << 10
# A choice is written by a program: labels of a classification, thousands of them.
MAX_CHOICES_LENGTH = 512 << 10
_MAX_NESTING = 64
_LARK_FUEL = 50_000

_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class SchemaError(MoedgeError, ValueError):
    """The schema is not a JSON schema, or a grammar cannot enforce it, or not within the limits on work.

    The same for a regex or a grammar.
    """

    exit_code = ExitCode.INPUT


@dataclass(frozen=True, slots=True)
class Lark:
    """A grammar in llguidance's form of Lark's syntax, whose rule `start` is the whole answer; `most` characters."""

    text: str
    most: int = MAX_GRAMMAR_LENGTH

    @classmethod
    def of_regex(cls, regex: str) -> Lark:
        """An answer that a regex of Rust's syntax matches as a whole."""
        # A slash ends a regex in a grammar, unless a backslash is before it.
        return cls("start: /" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL) + "/")

    @classmethod
    def of_choice(cls, texts: Sequence[str]) -> Lark:
        """An answer that is one of `texts`."""
        # One regex: of strings beside each other, llguidance follows 2,000 at most.
        return cls(cls.of_regex(_one_of(sorted(set(texts)))).text, MAX_CHOICES_LENGTH)


def _one_of(texts: Sequence[str], depth: int = 0) -> str:
    """A regex of sorted texts in which common beginnings stand once."""
    if depth == _MAX_NESTING:
        return "|".join(map(_escaped, texts))
    parts = []
    for _, group in groupby(texts, key=lambda text: text[:1]):
        found = list(group)
        begin = commonprefix([found[0], found[-1]])  # noqa: RUF071
        rest = _one_of([text[len(begin) :] for text in found], depth + 1) if len(found) > 1 else ""
        parts.append(_escaped(begin) + (f"({rest})" if rest else ""))
    return "|".join(parts)


def _escaped(text: str) -> str:
    return re.sub(r"[^\w ]|_", lambda found: f"\\u{{{ord(found[0]):x}}}", text)


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """An answer that is one call of a function, as Qwen's and Hermes' templates ask for it (text/messages.py).

    `text` is a grammar in which each function's arguments have the JSON schema of its parameters.
    """

    text: str

    @classmethod
    def of_tools(cls, tools: Sequence[Mapping[str, Any]]) -> ForcedCall:
        """A call of one of these tools, of which there is at least one."""
        rules = ["start: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
        for number, tool in enumerate(tools):
            function = tool["function"]
            begin = json.dumps(f'<tool_call>\n{{"name": "{function["name"]}", "arguments": ')
            schema = {"type": "object", **(function.get("parameters") or {})}
            rules.append(f'call_{number}: {begin} arguments_{number} "}}\\n</tool_call>"')
            rules.append(f"arguments_{number}: {_json_rule(schema)}")
        return cls("\n".join(rules))


def _json_rule(schema: Any) -> str:
    """Raises RecursionError for a schema that is nested too deeply."""
    return "%json " + json.dumps(_bounded(schema) | {"x-guidance": _OPTIONS})


# The text of a JSON schema, or another grammar.
AnswerForm = str | Lark | ForcedCall


def compile_schema(schema: AnswerForm) -> str:
    """Compiles a schema's text, or another grammar, to llguidance's grammar.

    Raises SchemaError, and MissingExtra without llguidance.
    """
    if find_spec("llguidance") is None:
        raise MissingExtra("response_format and structured_outputs need llguidance", "json")
    from llguidance import LLMatcher

    text = schema if isinstance(schema, str) else schema.text
    most = schema.most if isinstance(schema, Lark) else MAX_SCHEMA_NBYTES
    if len(text) > most:
        unit = "characters" if isinstance(schema, Lark) else "bytes as ASCII"
        raise SchemaError(f"it has {len(text)} {unit}, at most {most} are accepted")
    if isinstance(schema, str):
        try:
            text = "start: " + _json_rule(json.loads(schema))
        except RecursionError:
            raise SchemaError("it is nested too deeply") from None
    elif isinstance(schema, Lark) and (setting := re.search(r"%(llguidance|json|regex)\b", text)):
        raise SchemaError(f"it has {setting[0]}, and no settings or grammars of other kinds are accepted inside one")
    grammar = LLMatcher.grammar_from_lark(_HEADER + text)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits(schema))
    if failed:
        raise SchemaError(first_line(messages[0]))
    return grammar


# Integers of a schema without bounds have at most 15 digits, which float64 holds exactly: a model that begins to write
# digits often goes on to the last token that it has.
_MOST_INTEGER = 10**15 - 1
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# Keys whose values are no schemas.
_VALUES = ("enum", "const", "default", "examples")


def _bounded(schema: Any) -> Any:
    """A JSON schema whose integers have bounds."""
    if isinstance(schema, list):
        return [_bounded(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in _VALUES else _bounded(value) for key, value in schema.items()}
    kinds = found.get("type")
    integer = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    given = [found[name] for name in _BOUNDS if name in found]
    small = all(isinstance(each, int | float) and abs(each) <= _MOST_INTEGER for each in given)
    if not integer or not small or found.keys() & {"enum", "const"}:
        return found
    low = {} if found.keys() & _BOUNDS[:2] else {"minimum": -_MOST_INTEGER}
    return found | low | ({} if found.keys() & _BOUNDS[2:] else {"maximum": _MOST_INTEGER})


def parser_limits(schema: AnswerForm = "") -> LLParserLimits:
    """Limits a mask to about 20 ms (llguidance counts work, not time) and a schema's automaton to about 60 MB."""
    from llguidance import LLParserLimits

    fuel = _LARK_FUEL if isinstance(schema, Lark) else None
    return LLParserLimits(max_lexer_states=40_000, verbose_errors=False, initial_lexer_fuel=fuel)


def first_line(message: str) -> str:
    """What is wrong, without the position in the internal grammar and without the quoted grammar.

    Of a regex the last line says it (regex-syntax's `error: ...`).
    """
    line, *rest = _POSITION.sub("", message.strip()).splitlines() or ["unknown error"]
    why = next((each.strip() for each in rest if line.endswith(":") and each.startswith("error: ")), "")
    return f"{line} {why}".strip()[:300]


class GrammarState:
    """The state of one sequence in its grammar. It depends on the output tokens alone: preemption may ignore it.

    `complete`: nothing may follow. `error`: why the grammar cannot be followed further; empty if it can.
    """

    __slots__ = ("complete", "error", "mask_words", "matcher")

    def __init__(self, matcher: LLMatcher, mask_words: int) -> None:
        """A mask has `mask_words` words of 32 bits, one bit for each token of the matcher's vocabulary."""
        self.matcher = matcher
        self.mask_words = mask_words
        self.complete = False
        self.error = ""

    def append(self, token_id: int) -> None:
        """Advances by the sequence's next token, which the mask allowed."""
        self.matcher.consume_token(token_id)
        self.check()
        self.complete = not self.error and self.matcher.is_stopped()

    def check(self) -> None:
        """Sets `error` if the matcher failed, as it does when a parse becomes too complex."""
        if self.matcher.is_error():
            self.error = "the schema cannot be followed: " + first_line(self.matcher.get_error())


# The number of compiled schemas that are kept: jobs have one or a few, and a hostile one takes about 60 MB.
MAX_KEPT = 16


class Grammars:
    """Compiles schemas for one tokenizer and keeps the most recent ones; for one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab` is the number of logits, which may exceed the tokenizer's vocabulary."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._compiled: OrderedDict[AnswerForm, LLMatcher] = OrderedDict()

    def start(self, schema: AnswerForm) -> GrammarState:
        """The state before the first token of a text that follows the schema or grammar. Raises SchemaError."""
        matcher = self._compiled.get(schema)
        if matcher is None:
            matcher = self._compile(schema)
            self._compiled[schema] = matcher
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(schema)
        return GrammarState(matcher.deep_copy(), -(-self._guidance_tokenizer.vocab_size // 32))

    def _compile(self, schema: AnswerForm) -> LLMatcher:
        grammar = compile_schema(schema)
        from llguidance import LLMatcher

        matcher = LLMatcher(self._guidance_tokenizer, grammar, log_level=0, limits=parser_limits(schema))
        # Only the first mask reveals a schema that no text satisfies.
        matcher.compute_bitmask()
        if matcher.is_error():
            found = first_line(matcher.get_error())
            raise SchemaError("no text satisfies it" if found.startswith("NoExtension") else found)
        return matcher

    @cached_property
    def _guidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self._tokenizer, self._vocab)
        # Without an end token only the grammar ends a text: the substitute id is beyond all logits.
        eos_ids = list(self._tokenizer.eos_token_ids) or [vocabulary.substitute_eos]
        return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=eos_ids)


class _Vocabulary:
    """The vocabulary in llguidance's terms: the bytes that each token adds to the text, as in the detokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.substitute_eos = max(vocab, tokenizer.num_tokens)
        self.tokens = [tokenizer.token_text(token_id).data for token_id in range(self.substitute_eos)] + [b""]
        # An end token among them must not pass for text in the middle of a string.
        self.special_token_ids = sorted({*tokenizer.special_ids, *tokenizer.eos_token_ids, self.substitute_eos})
        self.eos_token_id = next(iter(tokenizer.eos_token_ids), self.substitute_eos)
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("grammars without forcing make no tokens of text")
