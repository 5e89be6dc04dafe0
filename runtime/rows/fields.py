"""Every field that a row may have in each of the three forms, what its value may be, and which fields are refused.

A check returns the value that it accepts, in one type, or says what it wanted. What a chat message may be is in
text/messages.py; what a JSON schema may say is checked by `Schemas`, once for all rows that share it. The tables at the
end name the fields that are read, those that cannot change an answer, and those that would.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar, get_args

from ..sampling.grammar import ANY_OBJECT, AnswerForm, ForcedCall, Lark, SchemaError, compile_schema
from ..sampling.params import LIMITS, Limit
from ..settings.errors import BadArgument, shown
from ..settings.options import ReasoningEffort
from ..text.messages import BadMessage, MessageFault, joined_parts, read_messages, read_tools
from .row import ChatPrompt, Endpoint, ErrorCode, InvalidRow, TextPrompt, TokenPrompt, parse_object

T = TypeVar("T")
MAX_STOP = 16
MAX_TOKEN_ID = (1 << 31) - 1


# Takes a value and the name of its field, and returns what it accepts. Raises InvalidRow.
Check = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Number:
    """A number within limits. A whole one may be written as 3.0, because tables of numbers often are."""

    limit: Limit
    whole: bool = False

    def __call__(self, value: Any, param: str) -> Any:
        if type(value) not in (int, float) or (self.whole and isinstance(value, float) and not value.is_integer()):
            raise wrong_type(value, param, "a whole number" if self.whole else "a number")
        if value not in self.limit:
            raise wrong_value(value, param, str(self.limit))
        return int(value) if self.whole else float(value)


def whole(limit: Limit) -> Number:
    return Number(limit, whole=True)


def flag(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(value, param, "true or false")
    return value


def prompt_logprobs(value: Any, param: str) -> int | None:
    """True asks for those of the prompt's own tokens, a number for that many alternatives to each."""
    if isinstance(value, bool):
        return 0 if value else None
    found: int = whole(LIMITS["prompt_logprobs"])(value, param)
    return found


def text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, param, "a string")
    return value


def stop_strings(value: Any, param: str) -> tuple[str, ...]:
    """One string or a list of up to 16; an empty one would end every answer before it starts."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) for item in strings):
        raise wrong_type(value, param, "a string or a list of strings")
    if len(strings) > MAX_STOP or "" in strings:
        raise wrong_value(value, param, f"at most {MAX_STOP} strings, none of them empty")
    return tuple(strings)


def token_ids(value: Any, param: str) -> tuple[int, ...]:
    """Whole numbers from 0; which of them the vocabulary has is not known here."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise wrong_type(value, param, "a list of token ids")
    if value and not (min(value) >= 0 and max(value) <= MAX_TOKEN_ID):
        raise wrong_value(value, param, f"token ids from 0 to {MAX_TOKEN_ID}")
    return tuple(value)


def wrong_type(value: Any, param: str, wanted: str) -> InvalidRow:
    return InvalidRow(ErrorCode.INVALID_TYPE, f"{param} must be {wanted}, found {shown(value)}", param)


def wrong_value(value: Any, param: str, wanted: str) -> InvalidRow:
    return InvalidRow(ErrorCode.INVALID_VALUE, f"{param} must be {wanted}, found {shown(value)}", param)


# How a row's error calls each thing that can be wrong with a message.
_CODE_OF_MESSAGE = {
    MessageFault.TYPE: ErrorCode.INVALID_TYPE,
    MessageFault.VALUE: ErrorCode.INVALID_VALUE,
    MessageFault.MISSING: ErrorCode.MISSING_PARAMETER,
    MessageFault.UNKNOWN: ErrorCode.UNKNOWN_PARAMETER,
    MessageFault.UNSUPPORTED: ErrorCode.UNSUPPORTED_PARAMETER,
}


def messages(value: Any, param: str) -> ChatPrompt:
    """Text parts are joined by newlines, as vLLM joins them for templates that take strings."""
    return ChatPrompt(tuple(joined_parts(as_row_error(read_messages, value, param))))


def as_row_error(check: Callable[[Any, str], T], value: Any, param: str) -> T:
    """What a check of messages returns; what it raises becomes an `InvalidRow`."""
    try:
        return check(value, param)
    except BadMessage as error:
        raise InvalidRow(_CODE_OF_MESSAGE[error.fault], str(error), error.where) from None


def tools(value: Any, param: str) -> tuple[dict[str, Any], ...]:
    """Function tools, as OpenAI has them."""
    return as_row_error(read_tools, value, param)


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The function that an answer must call."""

    name: str


def tool_choice(value: Any, param: str) -> str | NamedTool:
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return NamedTool(function["name"])
    wanted = '"auto", "none", "required", or {"type": "function", "function": {"name": ...}}'
    raise wrong_value(value, param, wanted)


EFFORTS = get_args(ReasoningEffort)
MAX_KWARGS_LENGTH = 64 << 10
# What the template gets from elsewhere. The names of special tokens end in _token, or _tokens.
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


def reasoning_effort(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, param, "a string")
    if value not in EFFORTS:
        raise wrong_value(value, param, f"one of {', '.join(EFFORTS)}")
    return value


def chat_template_kwargs(value: Any, param: str) -> dict[str, Any]:
    """Variables of the chat template."""
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object")
    for name in value:
        if name in _OWN_VARIABLES or name.endswith(("_token", "_tokens")) or not name.isidentifier():
            message = f"{name[:64]!a} of {param} is not a variable that a row can set; remove it"
            raise InvalidRow(ErrorCode.INVALID_VALUE, message, f"{param}.{name[:64]}")
    if (length := len(json.dumps(value))) > MAX_KWARGS_LENGTH:
        message = f"{param} has {length} characters as JSON, at most {MAX_KWARGS_LENGTH} are accepted"
        raise InvalidRow(ErrorCode.INVALID_VALUE, message, param)
    return value


def kwargs_setting(given: str, name: str = "--chat-template-kwargs") -> str:
    """The same as the text of an option, in one spelling. Raises BadArgument."""
    try:
        value = parse_object(given.encode(errors="replace"))
        return json.dumps(chat_template_kwargs(value, name), sort_keys=True)
    except InvalidRow as error:
        raise BadArgument(f"{given[:60]!a} is not what {name} takes: {error}") from None


MAX_BIASES = 1024


def logit_bias(value: Any, param: str) -> tuple[tuple[int, float], ...]:
    """From token ids, which are names in JSON, to what is added to their logits."""
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object from token ids to numbers")
    if len(value) > MAX_BIASES:
        raise InvalidRow(
            ErrorCode.INVALID_VALUE, f"{param} has {len(value)} tokens, at most {MAX_BIASES} are accepted", param
        )
    number = Number(LIMITS["logit_bias"])
    for name in value:
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= MAX_TOKEN_ID):
            raise wrong_value(name, param, f"token ids from 0 to {MAX_TOKEN_ID} as names")
    if len(by_id := {int(name): number(bias, f"{param}.{name}") for name, bias in value.items()}) < len(value):
        raise InvalidRow(ErrorCode.INVALID_VALUE, f"{param} has a token id twice; keep one of them", param)
    return tuple(sorted(by_id.items()))


MAX_PROMPTS = 2048
_WANTED = "a string, a list of token ids, or a list of several of either kind"


def prompts(value: Any, param: str) -> tuple[TextPrompt | TokenPrompt, ...]:
    several = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(several) > MAX_PROMPTS:
        raise wrong_value(several, param, f"at most {MAX_PROMPTS} prompts")
    read = tuple(_prompt(item, param) for item in several)
    if len({type(item) for item in read}) > 1:
        raise wrong_type(value, param, _WANTED)
    return read


def _prompt(value: Any, param: str) -> TextPrompt | TokenPrompt:
    if not isinstance(value, str | list):
        raise wrong_type(value, param, _WANTED)
    if not value:
        raise wrong_value(value, param, "not empty: there is nothing to continue")
    return TextPrompt(value) if isinstance(value, str) else TokenPrompt(token_ids(value, param))


def choices(value: Any, param: str) -> tuple[str, ...]:
    """The answers of which each is scored."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise wrong_type(value, param, "a list of strings")
    if not 1 <= len(value) <= MAX_PROMPTS or "" in value or len(set(value)) < len(value):
        raise wrong_value(value, param, f"1 to {MAX_PROMPTS} strings, none of them empty and none twice")
    return tuple(value)


def choices_setting(given: str | Sequence[str]) -> tuple[str, ...]:
    """Those of an option: a list, or a text with commas between them. Raises BadArgument."""
    try:
        return choices([each.strip() for each in given.split(",")] if isinstance(given, str) else given, "choices")
    except InvalidRow as error:
        raise BadArgument(str(error)) from None


_KINDS = ("text", "json_object", "json_schema")
# What OpenAI has beside the schema; none of it changes what may be written.
_BESIDE_SCHEMA = {"name": str, "description": str, "strict": bool}
_MAX_VERDICTS = 4096


def response_format(value: Any, param: str, flat: bool = False) -> str | None:
    """The schema as text, with its properties in the order given; None for plain text.

    `flat` is the form of Responses: what describes the schema stands beside the type.
    """
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object with a type")
    kind = value.get("type")
    if kind not in _KINDS:
        raise wrong_value(kind, f"{param}.type", f"one of {', '.join(_KINDS)}")
    if kind == "json_schema" and flat:
        return _schema({name: each for name, each in value.items() if name != "type"}, param)
    only(value, ("type", "json_schema") if kind == "json_schema" else ("type",), param)
    if kind == "json_schema":
        return _schema(value.get("json_schema"), f"{param}.json_schema")
    return ANY_OBJECT if kind == "json_object" else None


_FORMS = ("json", "json_object", "regex", "choice", "grammar")


def structured_outputs(value: Any, param: str) -> AnswerForm | None:
    """vLLM's name for the form of an answer: one of `_FORMS`."""
    if not isinstance(value, dict):
        raise wrong_type(value, param, f"an object with one of {', '.join(_FORMS)}")
    only(value, _FORMS, param)
    given = {name: form for name, form in value.items() if form is not None}
    if len(given) != 1:
        raise wrong_value(value, param, f"an object with exactly one of {', '.join(_FORMS)}")
    ((name, form),) = given.items()
    where = f"{param}.{name}"
    match name:
        case "json":
            return _json_form(form, where)
        case "json_object":
            return ANY_OBJECT if flag(form, where) else None
        case "choice":
            return _choice(form, where)
    if not text(form, where):
        raise wrong_value(form, where, "not empty")
    return Lark.of_regex(form) if name == "regex" else Lark(form)


def _json_form(value: Any, param: str) -> str:
    """A schema, or the text of one."""
    if isinstance(value, str):
        try:
            value = parse_object(value.encode())
        except InvalidRow:
            raise wrong_value(value, param, "a JSON schema, or the text of one") from None
    if not isinstance(value, dict):
        raise wrong_type(value, param, "a JSON schema")
    return json.dumps(value, separators=(",", ":"))


def _choice(value: Any, param: str) -> Lark:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise wrong_type(value, param, "a list of strings")
    if not value or "" in value:
        raise wrong_value(value, param, "at least one string, none of them empty")
    return Lark.of_choice(value)


def invalid_schema(schema: AnswerForm, error: SchemaError | str) -> InvalidRow:
    """What is wrong with the form that a row asks its answer to have."""
    if isinstance(schema, ForcedCall):
        message = f"the parameters of a tool are refused: {error}"
        return InvalidRow(ErrorCode.INVALID_JSON_SCHEMA, message, "tools")
    if isinstance(schema, Lark):
        return InvalidRow(ErrorCode.INVALID_GRAMMAR, f"the grammar is refused: {error}", "structured_outputs")
    return InvalidRow(ErrorCode.INVALID_JSON_SCHEMA, f"the JSON schema is refused: {error}", "response_format")


class Schemas:
    """Which schemas of a file can be followed; each is compiled once, and 16 bytes of it are remembered."""

    def __init__(self) -> None:
        self._verdicts: dict[bytes, InvalidRow | None] = {}

    def check(self, schema: AnswerForm) -> None:
        """Raises `InvalidRow` for a schema that is refused, and MissingExtra where no schema can be followed."""
        text, kind = (schema, b"json") if isinstance(schema, str) else (schema.text, type(schema).__name__.encode())
        digest = blake2b(text.encode(), digest_size=16, person=kind).digest()
        if digest not in self._verdicts:
            if len(self._verdicts) >= _MAX_VERDICTS:
                self._verdicts.clear()
            self._verdicts[digest] = _verdict(schema)
        fault = self._verdicts[digest]
        if fault is not None:
            raise fault


def _verdict(schema: AnswerForm) -> InvalidRow | None:
    try:
        compile_schema(schema)
    except SchemaError as error:
        return invalid_schema(schema, error)
    return None


def _schema(value: Any, param: str) -> str:
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object with name and schema")
    only(value, (*_BESIDE_SCHEMA, "schema"), param)
    for name, kind in _BESIDE_SCHEMA.items():
        if value.get(name) is not None and not isinstance(value[name], kind):
            raise wrong_type(value[name], f"{param}.{name}", "a string" if kind is str else "true or false")
    schema = value.get("schema")
    if schema is None:
        raise InvalidRow(ErrorCode.MISSING_PARAMETER, f"{param}.schema is missing", f"{param}.schema")
    if not isinstance(schema, dict):
        raise wrong_type(schema, f"{param}.schema", "an object")
    return json.dumps(schema, separators=(",", ":"))


def only(value: Mapping[str, Any], known: tuple[str, ...], param: str) -> None:
    """Raises `InvalidRow` for a field of `param` that is not known."""
    for name in value:
        if name not in known:
            message = f"{shown(name)} of {param} is not a known field; known are {', '.join(known)}"
            raise InvalidRow(ErrorCode.UNKNOWN_PARAMETER, message, f"{param}.{name[:64]}")


CHAT, COMPLETION, SHORT = Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.SHORT
NUM_SAMPLES = Limit(1, 128)
# Rows say -1 or 0 for "off", the sampler 0.
TOP_K = Limit(-1, LIMITS["top_k"].high)


def _everywhere(check: Check) -> Mapping[Endpoint, Check]:
    return dict.fromkeys((CHAT, COMPLETION, SHORT), check)


FIELDS: Mapping[str, Mapping[Endpoint, Check]] = {
    "messages": {CHAT: messages, SHORT: messages},
    "prompt": {COMPLETION: prompts, SHORT: prompts},
    "model": {CHAT: text, COMPLETION: text},
    "max_tokens": _everywhere(whole(LIMITS["max_tokens"])),
    "max_completion_tokens": {CHAT: whole(LIMITS["max_tokens"])},
    "temperature": _everywhere(Number(LIMITS["temperature"])),
    "top_p": _everywhere(Number(LIMITS["top_p"])),
    "top_k": _everywhere(whole(TOP_K)),
    "min_p": _everywhere(Number(LIMITS["min_p"])),
    "repetition_penalty": _everywhere(Number(LIMITS["repetition_penalty"])),
    "presence_penalty": _everywhere(Number(LIMITS["presence_penalty"])),
    "frequency_penalty": _everywhere(Number(LIMITS["frequency_penalty"])),
    "seed": _everywhere(whole(LIMITS["seed"])),
    "stop": _everywhere(stop_strings),
    "stop_token_ids": _everywhere(token_ids),
    "ignore_eos": _everywhere(flag),
    "n": _everywhere(whole(NUM_SAMPLES)),
    "logprobs": {CHAT: flag, COMPLETION: whole(LIMITS["logprobs"])},
    "top_logprobs": {CHAT: whole(LIMITS["logprobs"])},
    "prompt_logprobs": _everywhere(prompt_logprobs),
    "logprob_start_len": _everywhere(whole(LIMITS["logprob_start_len"])),
    "logit_bias": _everywhere(logit_bias),
    "min_tokens": _everywhere(whole(LIMITS["min_tokens"])),
    "response_format": _everywhere(response_format),
    "structured_outputs": _everywhere(structured_outputs),
    "choices": {SHORT: choices},
    "tools": {CHAT: tools, SHORT: tools},
    "tool_choice": {CHAT: tool_choice, SHORT: tool_choice},
    "chat_template_kwargs": {CHAT: chat_template_kwargs, SHORT: chat_template_kwargs},
    "reasoning_effort": {CHAT: reasoning_effort, SHORT: reasoning_effort},
    "max_thinking_tokens": {
        CHAT: whole(LIMITS["max_thinking_tokens"]),
        SHORT: whole(LIMITS["max_thinking_tokens"]),
    },
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
# A user's own fields, whatever they are called.
FREE_PREFIX = "x-"

# A field that would change the answer, and the values of it that would not.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "verbosity": (),
    "web_search_options": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
}


def read_fields(body: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The checked values of the fields that were given; null is not given. Raises `InvalidRow`.

    Fields of requests for Responses are read by responses.py.
    """
    given, checks = {}, _CHECKS[endpoint]
    for name, value in body.items():
        if value is None:
            continue
        check = checks.get(name)
        if check is not None:
            given[name] = check(value, name)
        elif not (
            name in IGNORED
            or name.startswith(FREE_PREFIX)
            or changes_nothing(value, UNSUPPORTED.get(name, ()))
            or is_own(name, endpoint)
        ):
            raise _refusal(name, endpoint)
    return given


def changes_nothing(value: Any, same: tuple[Any, ...]) -> bool:
    """Whether a value of an unsupported field is one of those that would not change the answer."""
    return any(type(value) is type(each) and value == each for each in same)


# Parameters of other programs, and what says the same here: as a field of one's own each would be a silent slip.
FOREIGN: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "temp": "temperature",
    "do_sample": "temperature",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "system": "messages, with the role system",
    "json_schema": "response_format",
}
# From which share of equal characters a name is a slip of another: `max_token` is one, `prompt_id` and `topic` are not.
_SLIP = 0.82


@lru_cache(maxsize=4096)
def slip_of(name: str, known: tuple[str, ...]) -> str | None:
    """The field that was meant by `name`, which is none; None for a name of the user's own."""
    plain = name[:64].lower().replace("-", "_")
    if plain in FOREIGN:
        return FOREIGN[plain]
    return next(iter(get_close_matches(plain, known, n=1, cutoff=_SLIP)), None)


def is_own(name: str, endpoint: Endpoint) -> bool:
    """Whether a field is the user's own, which answers repeat; only short rows have such fields beside the others."""
    if endpoint is not SHORT or name in _SHORT_NAMES:
        return False
    return name.startswith(FREE_PREFIX) or slip_of(name, _SHORT_NAMES) is None


_SHORT_NAMES = ("id", *FIELDS, *IGNORED, *UNSUPPORTED)


def unknown(name: str, known: tuple[str, ...]) -> InvalidRow:
    meant = slip_of(name, known) or next(iter(get_close_matches(name[:64], known, n=1)), None)
    advice = f"did you mean {meant}?" if meant else f"your own fields may start with {FREE_PREFIX}"
    return InvalidRow(ErrorCode.UNKNOWN_PARAMETER, f"{name[:64]!a} is not a known field; {advice}", name[:64])


def not_supported(name: str) -> str:
    return f"{name} would change the answer and is not supported; remove it"


def _refusal(name: str, endpoint: Endpoint) -> InvalidRow:
    if name in FIELDS:
        message = f"{name} is not a field of {endpoint.name.lower()} rows; remove it"
    elif name in UNSUPPORTED:
        message = not_supported(name)
    else:
        return unknown(name, _SHORT_NAMES if endpoint is SHORT else tuple(_CHECKS[endpoint]))
    return InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, message, name)
