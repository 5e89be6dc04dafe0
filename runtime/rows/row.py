"""One row of a job: its line of JSON, read strictly; what it asks for; and why it gets an error instead of an answer.

JSON is read without what Python's parser lets pass: duplicate keys, NaN and infinities (1e999 too), numbers of hundreds
of digits, deep nesting and lone surrogates are refused (RFC 8259, RFC 7493). A `RowFailure` has one code per reason,
which says what it does to the job, and is the only form of an error, from the line that was read to the line that is
written. Knows no file and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from hashlib import blake2b
from itertools import accumulate
from math import isinf
from typing import TYPE_CHECKING, Any, Never

from ..sampling.params import SequenceSampling

if TYPE_CHECKING:
    from ..sampling.grammar import AnswerForm


class Severity(Enum):
    ROW = "the row becomes an error row"
    LINE = "a strict job is refused, a lenient one makes it an error row"
    FILE = "the job is refused, strict or lenient"


# What the message of a row that reached max_tokens within its JSON says to do.
CONTINUE_CUT = "continue it with moedge jobs resume JOB --cut --max-tokens N"


class ErrorCode(StrEnum):
    """Listed from the file inwards; docs/batches.md says when each one is given."""

    EMPTY_FILE = "empty_file"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    DAMAGED_GZIP = "damaged_gzip"
    DAMAGED_ZSTD = "damaged_zstd"
    INPUT_CHANGED = "input_changed"

    LINE_TOO_LONG = "line_too_long"
    INVALID_UTF8 = "invalid_utf8"
    INVALID_JSON_LINE = "invalid_json_line"
    TOO_DEEP = "too_deep"
    DUPLICATE_KEY = "duplicate_key"
    NON_FINITE_NUMBER = "non_finite_number"
    NUMBER_TOO_LONG = "number_too_long"
    LONE_SURROGATE = "lone_surrogate"
    NOT_A_ROW = "not_a_row"
    INVALID_ID = "invalid_id"
    DUPLICATE_ID = "duplicate_id"
    UNKNOWN_URL = "unknown_url"

    MISSING_PARAMETER = "missing_parameter"
    INVALID_TYPE = "invalid_type"
    INVALID_VALUE = "invalid_value"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    INVALID_JSON_SCHEMA = "invalid_json_schema"
    INVALID_GRAMMAR = "invalid_grammar"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    KV_CACHE_EXCEEDED = "kv_cache_exceeded"
    INCOMPLETE_OUTPUT = "incomplete_output"
    NUMERICAL_ERROR = "numerical_error"
    WORKER_CRASHED = "worker_crashed"

    @property
    def may_change(self) -> bool:
        """Whether a run of the same row on this or another machine may answer it."""
        return self in _MAY_CHANGE

    @property
    def severity(self) -> Severity:
        if self in _FILE:
            return Severity.FILE
        return Severity.ROW if self in _ROW else Severity.LINE


_FILE = {
    ErrorCode.EMPTY_FILE,
    ErrorCode.UNSUPPORTED_ENCODING,
    ErrorCode.DAMAGED_GZIP,
    ErrorCode.DAMAGED_ZSTD,
    ErrorCode.INPUT_CHANGED,
}
_ROW = {
    ErrorCode.MISSING_PARAMETER,
    ErrorCode.INVALID_TYPE,
    ErrorCode.INVALID_VALUE,
    ErrorCode.UNKNOWN_PARAMETER,
    ErrorCode.UNSUPPORTED_PARAMETER,
    ErrorCode.INVALID_JSON_SCHEMA,
    ErrorCode.INVALID_GRAMMAR,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.KV_CACHE_EXCEEDED,
    ErrorCode.INCOMPLETE_OUTPUT,
    ErrorCode.NUMERICAL_ERROR,
    ErrorCode.WORKER_CRASHED,
}
# Another run may have more memory for the KV cache; the model's context stays as it is.
_MAY_CHANGE = {ErrorCode.KV_CACHE_EXCEEDED, ErrorCode.NUMERICAL_ERROR, ErrorCode.WORKER_CRASHED}


@dataclass(frozen=True, slots=True)
class RowFailure:
    """The error of one row, and its line and id.

    `param` is the field at fault, in the words of the row. `index` counts rows from 0, `line` counts the lines of the
    file from 1; line 0 is the whole file. `short` says in which form the error is answered; `own` are the fields of the
    user that the answer repeats. `partial` is the text that was generated until then, by choice.
    """

    code: ErrorCode
    message: str
    param: str | None = None
    index: int = 0
    line: int = 0
    id: str = ""
    short: bool = False
    own: Mapping[str, Any] = field(default_factory=dict, compare=False)
    partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "file"
        return f"{where}: {self.code}: {self.message}"


# Of all rows, that have the same error: from here on the job is refused.
MOST_ROWS = 0.5


def common_error(codes: Mapping[ErrorCode, int], num_rows: int) -> ErrorCode | None:
    """The error that most rows have, which is a slip of whoever wrote the file, and not of a row."""
    code, count = max(codes.items(), key=lambda item: item[1], default=(None, 0))
    return code if count > num_rows * MOST_ROWS else None


class InvalidRow(Exception):
    """Carries a failure from the field at fault to the reader, which knows the row. Never leaves this folder."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.failure = RowFailure(code, message, param)


def row_seed(job_seed: int, row_id: str) -> int:
    """63 bits for a row that names no seed: equal prompts under different ids get different samples."""
    return _hash63(f"{job_seed}:{row_id}", b"moedge.row")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice of a row; the first choice uses the row's seed as it is."""
    return seed if choice == 0 else _hash63(f"{seed}:{choice}", b"moedge.choice")


def _hash63(text: str, purpose: bytes) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=purpose).digest()) >> 1


class Endpoint(Enum):
    """Which contract a row was written in; it decides the shape of the answer."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSE = "/v1/responses"
    SHORT = "short"

    def called(self, name: str) -> str:
        """What a row of this contract calls the field `name` of a chat."""
        return _NAMES_OF_RESPONSES.get(name, name) if self is Endpoint.RESPONSE else name


_NAMES_OF_RESPONSES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is continued as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are continued as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages (text/messages.py) that go through the model's chat template, with function tools and further variables
    of it; the content of each is one text."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Defaults(SequenceSampling):
    """Values for absent fields of a row; the seed of each row is derived from `seed`, the seed of the job.

    `logprobs` and `prompt_logprobs` have no default: only a row itself can ask for them. `chat_template_kwargs` is the
    text of a JSON object, or nothing: a journal keeps it and compares it. `schema` is the text of a JSON schema. The
    others say what prompts are made of: `prompt_column` and `id_column` name fields of a row, `prompt` and `system` are
    templates over its fields, and `chat` makes prompts messages of a user; None is "as the model can". `choices` are
    scored instead of generating.
    """

    max_tokens: int = 256
    chat_template_kwargs: str = ""
    reasoning_effort: str | None = None
    schema: str | None = None
    choices: tuple[str, ...] = ()
    prompt_column: str | None = None
    id_column: str | None = None
    prompt: str | None = None
    system: str | None = None
    chat: bool | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """`index` counts rows from 0, `line` counts the file's lines from 1; blank lines make them differ.

    `schema` is the text of a JSON schema, or another grammar, that every answer must follow. Where there are `scored`
    texts, nothing is generated: the answer says how likely each of them is. `own` are the user's fields, which the
    answer repeats beside its own; `repeated` are fields of a request that the body of its answer repeats, such as
    OpenAI's `metadata`.
    """

    index: int
    line: int
    id: str
    endpoint: Endpoint
    prompts: tuple[Prompt, ...]
    params: SequenceSampling
    num_samples: int = 1
    model: str | None = None
    return_token_ids: bool = False
    schema: AnswerForm | None = None
    scored: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict, compare=False)
    repeated: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def chat(self) -> bool:
        """Whether it is a conversation, not a text to continue."""
        return isinstance(self.prompts[0], ChatPrompt)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Those that the model may call."""
        prompt = self.prompts[0]
        return prompt.tools if isinstance(prompt, ChatPrompt) else ()

    @property
    def short(self) -> bool:
        return self.endpoint is Endpoint.SHORT

    def failure(self, code: ErrorCode, message: str, param: str | None = None) -> RowFailure:
        """Of this row; `param` is what a chat calls the field."""
        param = None if param is None else self.endpoint.called(param)
        return RowFailure(code, message, param, self.index, self.line, self.id, self.short, self.own)

    def choices(self) -> Iterator[tuple[int, SequenceSampling]]:
        """The row's sequences in the order of its answer: all samples of a prompt, which is counted from 0, then the
        next prompt."""
        # The first keeps the row's seed; most rows have no other.
        yield 0, self.params
        for choice in range(1, len(self.prompts) * self.num_samples):
            seed = choice_seed(self.params.seed, choice)
            yield choice // self.num_samples, replace(self.params, seed=seed)


MAX_DEPTH = 64
# The largest double has 309 digits; int() itself may be configured to refuse anything above 640.
MAX_NUMBER_CHARS = 400

_NESTING = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_NOT_BRACKETS = bytes(set(range(256)) - set(_NESTING))
_STRING = re.compile(rb'"[^"]*"?')
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(line: bytes) -> dict[str, Any]:
    """Raises `InvalidRow` for anything but one JSON object."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRow(
            ErrorCode.INVALID_UTF8, f"byte {error.start + 1} is not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from None
    _check_depth(line)
    value = _decode(text)
    if not isinstance(value, dict):
        raise InvalidRow(ErrorCode.INVALID_JSON_LINE, f"expected a JSON object, found a bare {text.lstrip()[:20]!a}")
    if b"\\u" in line and _SURROGATE_ESCAPE.search(line):
        _check_surrogates(value)
    return value


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        # One of its messages ends in "at" itself.
        message = error.msg.removesuffix(" at")
        raise InvalidRow(ErrorCode.INVALID_JSON_LINE, f"{message} at column {error.colno}") from None


def _check_depth(line: bytes) -> None:
    """Before parsing, because the parser recurses: its limit would depend on the caller's stack."""
    if line.count(b"{") + line.count(b"[") <= MAX_DEPTH:
        return
    unescaped = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _STRING.sub(b"", unescaped).translate(None, _NOT_BRACKETS)
    if any(depth > MAX_DEPTH for depth in accumulate(map(_NESTING.__getitem__, brackets))):
        raise InvalidRow(ErrorCode.TOO_DEEP, f"nested deeper than {MAX_DEPTH} levels")


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRow(
            ErrorCode.LONE_SURROGATE,
            f"\\u{ord(error.object[error.start]):04x} is a lone surrogate; write the whole pair or the character",
        ) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) == len(pairs):
        return unique
    key, times = Counter(key for key, _ in pairs).most_common(1)[0]
    raise InvalidRow(ErrorCode.DUPLICATE_KEY, f"the key {key[:64]!a} is given {times} times; keep one of them")


def _finite(literal: str) -> float:
    _check_length(literal)
    value = float(literal)
    if isinf(value):
        raise InvalidRow(ErrorCode.NON_FINITE_NUMBER, f"{literal[:32]} is too large for a 64-bit float")
    return value


def _integer(literal: str) -> int:
    _check_length(literal)
    return int(literal)


def _check_length(literal: str) -> None:
    if len(literal) > MAX_NUMBER_CHARS:
        raise InvalidRow(
            ErrorCode.NUMBER_TOO_LONG,
            f"a number of {len(literal)} characters, at most {MAX_NUMBER_CHARS} are read",
        )


def _refuse_constant(literal: str) -> Never:
    raise InvalidRow(ErrorCode.NON_FINITE_NUMBER, f"{literal} is not JSON; leave the field out or give a number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_float=_finite, parse_int=_integer, parse_constant=_refuse_constant
)
