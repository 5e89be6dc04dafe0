"""Every field a row may have in each of the three forms, and what becomes of those that moedge does not run.

One table each: fields that are read, fields that cannot change an answer, fields that would.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ..sampling.params import LIMITS, Limit
from .failure import ErrorCode, InvalidRow
from .response_format import response_format
from .row import Endpoint
from .validators import Check, Integer, Number, flag, messages, prompts, stop_strings, text, token_ids

CHAT, COMPLETION, SHORT = Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.SHORT
NUM_SAMPLES = Limit(1, 128)
# Rows say -1 or 0 for "off", the sampler 0.
TOP_K = Limit(-1, LIMITS["top_k"].high)


def _everywhere(check: Check) -> Mapping[Endpoint, Check]:
    return dict.fromkeys(Endpoint, check)


FIELDS: Mapping[str, Mapping[Endpoint, Check]] = {
    "messages": {CHAT: messages, SHORT: messages},
    "prompt": {COMPLETION: prompts, SHORT: prompts},
    "model": {CHAT: text, COMPLETION: text},
    "max_tokens": _everywhere(Integer(LIMITS["max_tokens"])),
    "max_completion_tokens": {CHAT: Integer(LIMITS["max_tokens"])},
    "temperature": _everywhere(Number(LIMITS["temperature"])),
    "top_p": _everywhere(Number(LIMITS["top_p"])),
    "top_k": _everywhere(Integer(TOP_K)),
    "min_p": _everywhere(Number(LIMITS["min_p"])),
    "repetition_penalty": _everywhere(Number(LIMITS["repetition_penalty"])),
    "presence_penalty": _everywhere(Number(LIMITS["presence_penalty"])),
    "frequency_penalty": _everywhere(Number(LIMITS["frequency_penalty"])),
    "seed": _everywhere(Integer(LIMITS["seed"])),
    "stop": _everywhere(stop_strings),
    "stop_token_ids": _everywhere(token_ids),
    "ignore_eos": _everywhere(flag),
    "n": _everywhere(Integer(NUM_SAMPLES)),
    "logprobs": {CHAT: flag, COMPLETION: Integer(LIMITS["logprobs"])},
    "top_logprobs": {CHAT: Integer(LIMITS["logprobs"])},
    "response_format": _everywhere(response_format),
    "return_token_ids": _everywhere(flag),
}

# The same by endpoint: a row has one, and many fields.
_CHECKS: Mapping[Endpoint, Mapping[str, Check]] = {
    endpoint: {name: checks[endpoint] for name, checks in FIELDS.items() if endpoint in checks} for endpoint in Endpoint
}

IGNORED = (
    "user",
    "metadata",
    "store",
    "stream_options",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
# A user's own columns: never read, never answered.
FREE_PREFIX = "x-"

# A field that would change the answer, and the values of it that would not.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "length_penalty": (1.0,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
}


def read_fields(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The checked values of the fields that were given; null is not given. Raises `InvalidRow`."""
    given, checks = {}, _CHECKS[endpoint]
    for name, value in body.items():
        if value is None:
            continue
        check = checks.get(name)
        if check is not None:
            given[name] = check(value, name)
        elif not (name in IGNORED or name.startswith(FREE_PREFIX) or _neutral(name, value)):
            raise _refusal(name, endpoint)
    return given


def unknown(name: str, known: tuple[str, ...]) -> InvalidRow:
    nearest = get_close_matches(name[:64], known, n=1)
    advice = f"did you mean {nearest[0]}?" if nearest else f"fields of your own start with {FREE_PREFIX}"
    return InvalidRow(ErrorCode.UNKNOWN_PARAMETER, f"{name[:64]!a} is not a known field; {advice}", name[:64])


def _neutral(name: str, value: Any) -> bool:
    # The types are compared too: to Python 1 is True and 0 is False.
    return any(type(value) is type(same) and value == same for same in UNSUPPORTED.get(name, ()))


def _refusal(name: str, endpoint: Endpoint) -> InvalidRow:
    if name in FIELDS:
        message = f"{name} is no field of {endpoint.name.lower()} rows; remove it"
    elif name in UNSUPPORTED:
        message = f"{name} would change the answer and is not supported; remove it"
    else:
        return unknown(name, tuple(_CHECKS[endpoint]))
    return InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, message, name)
