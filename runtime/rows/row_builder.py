"""Checked fields and defaults become one `Row`. Knows how fields depend on each other, and no spelling of a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..sampling.params import SamplingParams
from .error_codes import ErrorCode, RowFault
from .fields import read_fields
from .prompts import MAX_PROMPTS
from .row import Defaults, Endpoint, Prompt, Row, row_seed


@dataclass(frozen=True, slots=True)
class Place:
    """Which row of the file: `index` counts rows from 0, `line` lines from 1."""

    index: int
    line: int
    id: str


class RowBuilder:
    """Builds the rows of one file."""

    def __init__(self, defaults: Defaults) -> None:
        self._seed = defaults.seed
        self._defaults: Mapping[str, Any] = {field.name: getattr(defaults, field.name) for field in fields(defaults)}

    def build(self, body: Mapping[str, Any], endpoint: Endpoint, place: Place) -> Row:
        """Raises `RowFault` naming the first field that cannot be run as it stands."""
        given = read_fields(body, endpoint)
        prompts, num_samples = _prompts(given, endpoint), given.get("n", 1)
        if len(prompts) * num_samples > MAX_PROMPTS:
            raise RowFault(
                ErrorCode.INVALID_VALUE,
                f"{len(prompts)} prompts with n {num_samples} are more than {MAX_PROMPTS} answers; split the row",
                "n",
            )
        return Row(
            index=place.index,
            line=place.line,
            id=place.id,
            endpoint=endpoint,
            prompts=prompts,
            params=self._params(given, place.id),
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
                raise RowFault(
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
    raise RowFault(ErrorCode.MISSING_PARAMETER, f"{name} is missing: there is nothing to answer", name)


def _max_tokens(given: Mapping[str, Any]) -> int:
    """Of a row that has OpenAI's newer name for it."""
    tokens: int = given["max_completion_tokens"]
    if given.get("max_tokens", tokens) != tokens:
        raise RowFault(
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
            raise RowFault(ErrorCode.INVALID_VALUE, "top_logprobs needs logprobs to be true", "top_logprobs")
        return None
    return top if asked is True else int(asked)
