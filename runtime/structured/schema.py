"""From a JSON schema to a grammar, or to what is wrong with it. Knows no vocabulary and no row.

Every limit counts work, none counts seconds: a schema is refused on every machine or on none.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import MissingExtra

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_SCHEMA_NBYTES = 128 << 10
# What a row gets that asks for an object and gives no schema.
ANY_OBJECT = '{"type":"object"}'

# Where only one text may follow, llguidance would allow only the tokens that its tokenizer makes of it: the model may
# spell the text in its own way instead.
_HEADER = '%llguidance {"no_forcing": true}\nstart: %json '
# They take the place of what the schema itself asks for: no row may switch checks off. One space is allowed between two
# tokens of JSON, so that no model can go on with blanks until its tokens end.
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": "[ ]", "coerce_one_of": False, "lenient": False}

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class SchemaError(ValueError):
    """The schema is no JSON schema, asks for what a grammar cannot promise, or for more work than is granted."""


def compile_schema(schema: str) -> str:
    """llguidance's grammar for the text of a schema. Raises SchemaError, and MissingExtra without llguidance."""
    if find_spec("llguidance") is None:
        raise MissingExtra("response_format needs llguidance, which is not installed: pip install 'moedge[json]'")
    from llguidance import LLMatcher

    if len(schema) > MAX_SCHEMA_NBYTES:
        raise SchemaError(f"it has {len(schema)} bytes as ASCII, at most {MAX_SCHEMA_NBYTES} are accepted")
    grammar = LLMatcher.grammar_from_lark(_HEADER + json.dumps(json.loads(schema) | {"x-guidance": _OPTIONS}))
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if failed:
        raise SchemaError(first_line(messages[0]))
    return grammar


def parser_limits() -> LLParserLimits:
    """A mask costs at most about 20 ms (llguidance counts work, not time), and a schema's automaton about 60 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=40_000, verbose_errors=False)


def first_line(message: str) -> str:
    """What is wrong, without where in the grammar, which nobody has seen, and without the grammar that is quoted."""
    line = next(iter(_PLACE.sub("", message.strip()).splitlines()), "unknown error")
    return line[:300]
