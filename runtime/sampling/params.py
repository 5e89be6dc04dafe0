"""The sampling parameters of a row, with their limits and results, and what a model's generation_config.json says of
those that nobody has given. Knows no tensor, no tokenizer and no row format.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...offload.checkpoint.checkpoint import find_inside
from ..settings.errors import shown


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence is continued; every field is resolved, none refers to another default.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch their filters off.
    `logprobs` is the number of alternatives reported per token; None reports no log-probabilities; `prompt_logprobs`
    is the same for the prompt's tokens from position `logprob_start_len` on. `logit_bias` holds (token id, number added
    to its logit). Before `min_tokens` no token ends the sequence. `max_thinking_tokens` bounds the reasoning of a chat
    answer, unless it is None.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_thinking_tokens: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


_INT63 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limit:
    """`low` to `high`, both included unless `open_low`; `value in limit` is False for NaN and infinities."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.open_low and value == self.low)

    def __str__(self) -> str:
        above = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        return above if self.high in (_INT63, sys.float_info.max) else f"{above} and at most {self.high:g}"


LIMITS = MappingProxyType(
    {
        "max_tokens": Limit(1, _INT63),
        "temperature": Limit(0.0, sys.float_info.max),
        "top_k": Limit(0, _INT63),
        "top_p": Limit(0.0, 1.0, open_low=True),
        "min_p": Limit(0.0, 1.0),
        "repetition_penalty": Limit(0.0, sys.float_info.max, open_low=True),
        "presence_penalty": Limit(-2.0, 2.0),
        "frequency_penalty": Limit(-2.0, 2.0),
        "seed": Limit(0, _INT63),
        "logprobs": Limit(0, 20),
        "prompt_logprobs": Limit(0, 20),
        "logprob_start_len": Limit(0, _INT63),
        "logit_bias": Limit(-100.0, 100.0),
        "min_tokens": Limit(0, _INT63),
        "max_thinking_tokens": Limit(0, _INT63),
    }
)


class FinishReason(StrEnum):
    """Why a sequence ended; ERROR never reaches an answer, because its row fails. No sequence ends with TOOL_CALLS:
    an answer does that was found to call functions."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural logarithm of a token's probability by the model's own logits, before penalties and filters.

    `rank` is 1 for the most likely token. `top` holds the most likely tokens, best first, lower id first among
    equals; tokens with a logit of -inf never appear, so that it can be shorter than requested.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_NBYTES = 4 << 20


def unset_names(temperature: float | None) -> frozenset[str]:
    """The names that a model may set where the caller gives `temperature` alone, or not even that."""
    return frozenset(NAMES) - (set() if temperature is None else {"temperature"})


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """`values` by the name of a sampling parameter; `ignored` says in words which of the file's are not used."""

    values: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def only(self, names: Collection[str]) -> ModelDefaults:
        """Without the values that somebody else has set."""
        return ModelDefaults({name: value for name, value in self.values.items() if name in names}, self.ignored)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())


def model_defaults(folder: Path) -> ModelDefaults:
    """What the model's folder recommends; nothing where there is no file, or one that is no JSON object.

    Sampling is off where `do_sample` is false; where it is true and there is no temperature, that is 1, as in
    transformers.
    """
    data = find_inside(folder, FILE, _MAX_NBYTES)
    if data is None:
        return ModelDefaults()
    try:
        # A broken file is refused where its end tokens are read.
        content = json.loads(data)
    except (ValueError, RecursionError):
        return ModelDefaults()
    return _read(content) if isinstance(content, dict) else ModelDefaults()


def _read(content: Mapping[str, Any]) -> ModelDefaults:
    values: dict[str, Any] = {}
    ignored = []
    for name in NAMES:
        value = content.get(name)
        if value is None:
            continue
        if not _valid(name, value):
            ignored.append(f"{FILE}: {name} {shown(value)} is ignored; wanted a number {LIMITS[name]}")
        else:
            values[name] = max(int(value), 0) if name == "top_k" else float(value)
    sampled = content.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        ignored.append(f"{FILE}: do_sample {shown(sampled)} is ignored; wanted true or false")
    if sampled is False:
        values["temperature"] = 0.0
    elif sampled is True:
        values.setdefault("temperature", 1.0)
    return ModelDefaults(values, tuple(ignored))


def _valid(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "top_k":
        # -1 is off, as 0 is.
        whole = isinstance(value, int) or value.is_integer()
        return whole and (value == -1 or value in LIMITS[name])
    return value in LIMITS[name]
