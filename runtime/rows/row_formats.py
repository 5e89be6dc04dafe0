"""Parses a JSON object, in OpenAI's batch form or the short form, to a `Row` with id and defaults.

Knows how fields depend on each other; what each may be is in fields.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

from ..sampling.params import SamplingParams
from ..settings.errors import shown
from .failure import ErrorCode, InvalidRow
from .fields import FREE_PREFIX, MAX_PROMPTS, read_fields, unknown
from .row import Defaults, Endpoint, Prompt, Row, row_seed

MAX_ID_CHARS = 512


def line_id(line: int) -> str:
    """The name of a row that has none of its own."""
    return f"line-{line}"


def row_id(value: Any, line: int, param: str) -> str:
    if value is None:
        return line_id(line)
    if not isinstance(value, str):
        raise InvalidRow(ErrorCode.INVALID_ID, f"{param} must be a string, found {shown(value)}", param)
    if not 1 <= len(value) <= MAX_ID_CHARS:
        raise InvalidRow(
            ErrorCode.INVALID_ID, f"{param} has {len(value)} characters, expected 1 to {MAX_ID_CHARS}", param
        )
    return value


class UniqueIds:
    """About 150 bytes per row: a 16-byte digest of the id and the line that had it first."""

    def __init__(self) -> None:
        self._first_line: dict[bytes, int] = {}

    def add(self, row_id: str, line: int, param: str) -> None:
        """Raises `InvalidRow` if an earlier line had this id."""
        digest = blake2b(row_id.encode(), digest_size=16).digest()
        first = self._first_line.setdefault(digest, line)
        if first != line:
            raise InvalidRow(
                ErrorCode.DUPLICATE_ID, f"the id {row_id[:64]!a} is taken by line {first}; make it unique", param
            )


LINE_KEYS = ("custom_id", "method", "url", "body")
_ANY_OF_THEM = frozenset(LINE_KEYS)
_ENDPOINTS = {endpoint.value: endpoint for endpoint in (Endpoint.CHAT, Endpoint.COMPLETION)}


def is_openai(line: dict[str, Any]) -> bool:
    return not _ANY_OF_THEM.isdisjoint(line)


def openai_id(line: dict[str, Any], number: int) -> str:
    return row_id(line.get("custom_id"), number, "custom_id")


def openai_body(line: dict[str, Any]) -> tuple[Endpoint, dict[str, Any]]:
    url, body = line.get("url"), line.get("body")
    if not isinstance(url, str) or not isinstance(body, dict):
        raise InvalidRow(
            ErrorCode.NOT_A_ROW, "a batch line has custom_id, method, url (a string) and body (an object); add them"
        )
    if line.get("method") != "POST":
        raise InvalidRow(ErrorCode.NOT_A_ROW, f'method must be "POST", found {shown(line.get("method"))}', "method")
    if url not in _ENDPOINTS:
        raise InvalidRow(ErrorCode.UNKNOWN_URL, f"url {shown(url)} is not one of {', '.join(_ENDPOINTS)}", "url")
    for key in line:
        if key not in LINE_KEYS and not key.startswith(FREE_PREFIX):
            raise unknown(key, LINE_KEYS)
    return _ENDPOINTS[url], body


def is_short(line: dict[str, Any]) -> bool:
    return "prompt" in line or "messages" in line


def short_id(line: dict[str, Any], number: int) -> str:
    """Whole numbers are names too; the answer gives them back as strings."""
    value = line.get("id")
    return row_id(str(value) if type(value) is int else value, number, "id")


def short_body(line: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in line.items() if name != "id"}
    if body.get("prompt") is not None and body.get("messages") is not None:
        raise InvalidRow(ErrorCode.INVALID_VALUE, "prompt and messages are both given; keep one of them", "messages")
    if isinstance(body.get("prompt"), list) and not all(type(item) is int for item in body["prompt"]):
        raise InvalidRow(
            ErrorCode.INVALID_TYPE, "prompt of a short row must be one string or one list of token ids", "prompt"
        )
    return body


@dataclass(frozen=True, slots=True)
class RowPosition:
    """Which row of the file: `index` counts rows from 0, `line` lines from 1."""

    index: int
    line: int
    id: str


class RowBuilder:
    """Builds the rows of one file."""

    def __init__(self, defaults: Defaults) -> None:
        self._seed = defaults.seed
        self._defaults: Mapping[str, Any] = {field.name: getattr(defaults, field.name) for field in fields(defaults)}

    def build(self, body: Mapping[str, Any], endpoint: Endpoint, position: RowPosition) -> Row:
        """Raises `InvalidRow` naming the first field that cannot be run as it is."""
        given = read_fields(body, endpoint)
        prompts, num_samples = _prompts(given, endpoint), given.get("n", 1)
        if len(prompts) * num_samples > MAX_PROMPTS:
            raise InvalidRow(
                ErrorCode.INVALID_VALUE,
                f"{len(prompts)} prompts with n {num_samples} are more than {MAX_PROMPTS} answers; split the row",
                "n",
            )
        return Row(
            index=position.index,
            line=position.line,
            id=position.id,
            endpoint=endpoint,
            prompts=prompts,
            params=self._params(given, position.id),
            num_samples=num_samples,
            model=given.get("model"),
            return_token_ids=given.get("return_token_ids", False),
            schema=self._schema(given),
        )

    def _params(self, given: Mapping[str, Any], row_id: str) -> SamplingParams:
        values = dict(self._defaults)
        for name in given:
            if name in values:
                values[name] = given[name]
        values["logprobs"] = _num_logprobs(given)
        values["top_k"] = max(values["top_k"], 0)
        if "max_completion_tokens" in given:
            values["max_tokens"] = _max_tokens(given)
        if "seed" not in given:
            values["seed"] = row_seed(self._seed, row_id)
        return SamplingParams(**values)

    def _schema(self, given: Mapping[str, Any]) -> str | None:
        """A grammar alone ends its text: whatever else might would cut it."""
        schema: str | None = given.get("response_format")
        for name in ("stop", "stop_token_ids", "ignore_eos") if schema is not None else ():
            if given.get(name, self._defaults[name]):
                raise InvalidRow(
                    ErrorCode.INVALID_VALUE,
                    f"{name} and a JSON response_format are both given; keep one of them: JSON ends where it is "
                    "complete",
                    name,
                )
        return schema


def _prompts(given: Mapping[str, Any], endpoint: Endpoint) -> tuple[Prompt, ...]:
    if "messages" in given:
        return (given["messages"],)
    if "prompt" in given:
        prompts: tuple[Prompt, ...] = given["prompt"]
        return prompts
    name = "prompt" if endpoint is Endpoint.COMPLETION else "messages"
    raise InvalidRow(ErrorCode.MISSING_PARAMETER, f"{name} is missing: there is nothing to answer", name)


def _max_tokens(given: Mapping[str, Any]) -> int:
    """Of a row that has OpenAI's newer name for it."""
    tokens: int = given["max_completion_tokens"]
    if given.get("max_tokens", tokens) != tokens:
        raise InvalidRow(
            ErrorCode.INVALID_VALUE,
            f"max_tokens {given['max_tokens']} and max_completion_tokens {tokens} disagree",
            "max_tokens",
        )
    return tokens


def _num_logprobs(given: Mapping[str, Any]) -> int | None:
    """A chat row asks with a flag and a number, a completion row with one number."""
    asked, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if asked is False:
        if top:
            raise InvalidRow(ErrorCode.INVALID_VALUE, "top_logprobs needs logprobs to be true", "top_logprobs")
        return None
    return top if asked is True else int(asked)
