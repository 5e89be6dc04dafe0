"""A JSON object to a `Row` with id and defaults: in OpenAI's batch form, in the short form, or with columns of the
user's own, of which settings say which is the prompt or the id, or templates make the prompt.

Knows how fields depend on each other; what each may be is in fields.py. Templates are the user's own words, rows are
anybody's: a template runs in jinja2's sandbox, row text is only ever a value in it, and what it writes is bounded. The
settings are fields of `Defaults`, so they belong to a job's identity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sampling.grammar import AnswerForm, ForcedCall, SchemaError, compile_schema
from ..sampling.params import SequenceSampling
from ..settings.errors import BadArgument, InputUnreadable, shown
from .fields import FREE_PREFIX, MAX_PROMPTS, NamedTool, is_own, read_fields, slip_of, unknown
from .responses import read_response, repeated_fields
from .row import ChatPrompt, Defaults, Endpoint, ErrorCode, InvalidRow, Prompt, Row, parse_object, row_seed

if TYPE_CHECKING:
    from jinja2 import Environment


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
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint if endpoint is not Endpoint.SHORT}


def is_openai(line: dict[str, Any]) -> bool:
    """A short row may have a method, a url and a body among its own fields, as rows about web pages and mails do."""
    if _ANY_OF_THEM.isdisjoint(line):
        return False
    return "custom_id" in line or isinstance(line.get("body"), dict) or not is_short(line)


def is_batch_line(line: dict[str, Any]) -> bool:
    """A whole one, among rows of which any other object is short."""
    return isinstance(line.get("url"), str) and isinstance(line.get("body"), dict)


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
        if key not in LINE_KEYS and not _is_beside(key):
            raise unknown(key, LINE_KEYS)
    return _ENDPOINTS[url], body


def openai_own(line: Mapping[str, Any]) -> dict[str, Any]:
    """The user's fields of a batch line, beside those of OpenAI."""
    return {name: value for name, value in line.items() if name not in LINE_KEYS and _is_beside(name)}


def _is_beside(name: str) -> bool:
    """Fields of a body that stand outside of it are a mistake, not the user's own."""
    return name.startswith(FREE_PREFIX) or (is_own(name, Endpoint.SHORT) and slip_of(name, LINE_KEYS) is None)


def is_short(line: dict[str, Any]) -> bool:
    return "prompt" in line or "messages" in line


# Rows of common data sets, by their fields, and the smallest change that makes them rows.
_KNOWN_SHAPES = (
    (("conversations",), "rename conversations to messages, and from/value in it to role/content (ShareGPT)"),
    (("instruction", "input"), "give --prompt '{{ instruction }}\n\n{{ input }}' (alpaca)"),
    (("instruction",), "give --prompt-column instruction"),
    (("text",), "give --prompt-column text"),
    (("question",), "give --prompt-column question"),
    (("query",), "give --prompt-column query"),
    (("content",), "give --prompt-column content"),
    (("input",), "give --prompt-column input"),
)


def what_is_missing(line: Mapping[str, Any]) -> str:
    """Of an object that is no row: the fields that were found, and what would make it one."""
    if not line:
        return 'needs "prompt" or "messages" (or an OpenAI batch line); found: an empty object'
    found = ", ".join(ascii(key[:32]) for key in list(line)[:8])
    known = next((advice for names, advice in _KNOWN_SHAPES if line.keys() >= set(names)), None)
    texts = [name for name, value in line.items() if isinstance(value, str) and name != "id"]
    names = ", ".join(ascii(name[:32])[1:-1] for name in texts[:8])
    column = f"NAME, one of {names}" if len(texts) > 1 else names or "NAME"
    advice = known or f"name the column of the prompt: --prompt-column {column}"
    return f'needs "prompt" or "messages" (or an OpenAI batch line); found: {found}; {advice}'


def short_id(line: dict[str, Any], number: int, name: str = "id") -> str:
    """Whole numbers are names too; the answer gives them back as strings."""
    value = line.get(name)
    return row_id(str(value) if type(value) is int else value, number, name)


def short_body(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a short row without its id, where they do not contradict each other."""
    if body.get("prompt") is not None and body.get("messages") is not None:
        raise InvalidRow(ErrorCode.INVALID_VALUE, "prompt and messages are both given; keep one of them", "messages")
    if isinstance(body.get("prompt"), list) and not all(type(item) is int for item in body["prompt"]):
        raise InvalidRow(
            ErrorCode.INVALID_TYPE, "prompt of a short row must be one string or one list of token ids", "prompt"
        )
    return body


def short_own(line: Mapping[str, Any]) -> dict[str, Any]:
    """The user's fields of a short row, and its metadata."""
    return {name: value for name, value in line.items() if name == "metadata" or is_own(name, Endpoint.SHORT)}


@dataclass(frozen=True, slots=True)
class RowPosition:
    """Which row of the file: `index` counts rows from 0, `line` lines from 1; `own` are the user's fields of it."""

    index: int
    line: int
    id: str
    own: Mapping[str, Any] = field(default_factory=dict)


class RowBuilder:
    """Builds the rows of one file."""

    def __init__(self, defaults: Defaults) -> None:
        self._seed = defaults.seed
        self._schema_of_job, self._choices_of_job = defaults.schema, defaults.choices
        # SequenceSampling and what the chat template gets.
        self._defaults: Mapping[str, Any] = {
            field.name: getattr(defaults, field.name) for field in fields(SequenceSampling)
        }
        self._effort = defaults.reasoning_effort
        self._kwargs: dict[str, Any] = json.loads(defaults.chat_template_kwargs or "{}")

    def build(self, body: Mapping[str, Any], endpoint: Endpoint, position: RowPosition) -> Row:
        """Raises `InvalidRow` naming the first field that cannot be run as it is."""
        given = read_response(body) if endpoint is Endpoint.RESPONSE else read_fields(body, endpoint)
        scored = self._scored(given, endpoint)
        prompts, num_samples = self._chat(_prompts(given, endpoint), given, body, endpoint), given.get("n", 1)
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
            params=self._params({**given, "max_tokens": 1} if scored else given, endpoint, position.id),
            num_samples=num_samples,
            model=given.get("model"),
            return_token_ids=given.get("return_token_ids", False),
            schema=None if scored else self._schema(given, endpoint),
            scored=scored,
            own=position.own,
            repeated=_repeated(body, endpoint),
        )

    def _scored(self, given: Mapping[str, Any], endpoint: Endpoint) -> tuple[str, ...]:
        """The answers to score; the one token that a sequence generates is not looked at."""
        scored: tuple[str, ...] = given.get("choices") or (self._choices_of_job if endpoint is Endpoint.SHORT else ())
        for name in _GENERATING if scored else ():
            if given.get(name, _GENERATING[name]) != _GENERATING[name]:
                message = (
                    f"{name} and choices are both given; keep one of them: choices are scored, nothing is generated"
                )
                raise InvalidRow(ErrorCode.INVALID_VALUE, message, name)
        return scored

    def _params(self, given: Mapping[str, Any], endpoint: Endpoint, row_id: str) -> SequenceSampling:
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
        if values["min_tokens"] > values["max_tokens"]:
            raise InvalidRow(
                ErrorCode.INVALID_VALUE,
                f"min_tokens {values['min_tokens']} is more than {endpoint.called('max_tokens')} "
                f"{values['max_tokens']}; lower it",
                "min_tokens",
            )
        return SequenceSampling(**values)

    def _chat(
        self, prompts: tuple[Prompt, ...], given: Mapping[str, Any], body: Mapping[str, Any], endpoint: Endpoint
    ) -> tuple[Prompt, ...]:
        """`prompts` with what else the chat template gets."""
        prompt = prompts[0]
        if not isinstance(prompt, ChatPrompt):
            for name in _CHAT_ONLY:
                if name in given:
                    raise InvalidRow(ErrorCode.INVALID_VALUE, f"{name} needs messages, and there is a prompt", name)
            return prompts
        tools = given.get("tools", ()) if given.get("tool_choice") != "none" else ()
        forced = given.get("tool_choice", "auto") not in ("auto", "none")
        if forced and not tools:
            raise InvalidRow(
                ErrorCode.INVALID_VALUE, "tool_choice forces a call, and there are no tools", "tool_choice"
            )
        # A call that is forced is one alone.
        if tools and not forced and body.get("parallel_tool_calls") is False:
            name = "parallel_tool_calls"
            message = f"{name} false would change the answer and is not supported beside tools; remove it"
            raise InvalidRow(ErrorCode.UNSUPPORTED_PARAMETER, message, name)
        return (replace(prompt, tools=tools, variables=self._variables(given, endpoint)),)

    def _variables(self, given: Mapping[str, Any], endpoint: Endpoint) -> Mapping[str, Any]:
        own, effort = given.get("chat_template_kwargs", {}), given.get("reasoning_effort")
        if effort is not None and own.get("reasoning_effort", effort) != effort:
            name = endpoint.called("reasoning_effort")
            message = f"{name} and the reasoning_effort in chat_template_kwargs disagree; keep one of them"
            raise InvalidRow(ErrorCode.INVALID_VALUE, message, name)
        variables = {**self._kwargs, **own}
        if effort is not None or (self._effort is not None and "reasoning_effort" not in variables):
            variables["reasoning_effort"] = effort or self._effort
        return variables

    def _schema(self, given: Mapping[str, Any], endpoint: Endpoint) -> AnswerForm | None:
        """A grammar alone ends its text: whatever else might would cut it."""
        forms = [name for name in _FORMS if given.get(name) is not None]
        if len(forms) > 1:
            message = "response_format and structured_outputs are both given; keep one of them"
            raise InvalidRow(ErrorCode.INVALID_VALUE, message, "structured_outputs")
        of_job = None if any(name in given for name in _FORMS) else self._schema_of_job
        called = _forced_call(given)
        schema: AnswerForm | None = given[forms[0]] if forms else of_job or called
        if schema is None:
            return None
        named = endpoint.called(forms[0]) if forms else "--schema" if of_job else "tool_choice"
        for name in ("stop", "stop_token_ids", "ignore_eos", "min_tokens"):
            if given.get(name, self._defaults[name]):
                kind = f"a JSON {named}" if forms[:1] == ["response_format"] else named
                raise InvalidRow(
                    ErrorCode.INVALID_VALUE,
                    f"{name} and {kind} are both given; keep one of them: such an answer ends where it is complete",
                    name,
                )
        if schema is not called and given.get("tools") and given.get("tool_choice") != "none":
            message = f"tools and {named} are both given; keep one of them: an answer of that form calls no function"
            raise InvalidRow(ErrorCode.INVALID_VALUE, message, "tools")
        return schema


def _forced_call(given: Mapping[str, Any]) -> ForcedCall | None:
    """The form of an answer that must call a function: the one that is named, or any."""
    tools, choice = given.get("tools", ()), given.get("tool_choice")
    if isinstance(choice, NamedTool):
        chosen = [each for each in tools if each["function"]["name"] == choice.name]
        if not chosen:
            message = f"tool_choice names {choice.name[:64]!a}, which is not among the tools"
            raise InvalidRow(ErrorCode.INVALID_VALUE, message, "tool_choice")
        tools = chosen
    elif choice != "required":
        return None
    try:
        return ForcedCall.of_tools(tools) if tools else None
    except RecursionError:
        raise InvalidRow(
            ErrorCode.INVALID_JSON_SCHEMA, "the parameters of a tool are nested too deeply", "tools"
        ) from None


# Fields that say what form an answer must have.
_FORMS = ("response_format", "structured_outputs")
# Fields that say what is generated, and how each says nothing.
_GENERATING: Mapping[str, Any] = {
    **dict.fromkeys((*_FORMS, "prompt_logprobs", "tool_choice")), "tools": (), "n": 1, "min_tokens": 0,
    "return_token_ids": False,
}  # fmt: skip
_CHAT_ONLY = ("tools", "chat_template_kwargs", "reasoning_effort", "max_thinking_tokens")


def _prompts(given: Mapping[str, Any], endpoint: Endpoint) -> tuple[Prompt, ...]:
    if "messages" in given:
        return (given["messages"],)
    if "prompt" in given:
        prompts: tuple[Prompt, ...] = given["prompt"]
        return prompts
    name = endpoint.called("prompt" if endpoint is Endpoint.COMPLETION else "messages")
    raise InvalidRow(ErrorCode.MISSING_PARAMETER, f"{name} is missing: there is nothing to answer", name)


def _repeated(body: Mapping[str, Any], endpoint: Endpoint) -> Mapping[str, Any]:
    """The fields of a request that the body of its answer repeats."""
    if endpoint is Endpoint.RESPONSE:
        return repeated_fields(body)
    return {} if endpoint is Endpoint.SHORT or body.get("metadata") is None else {"metadata": body["metadata"]}


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


# The most characters that a template may write for one row; the tokenizer takes no more.
MAX_RENDERED = 16 << 20
_MAX_FILE_NBYTES = 1 << 20
_FILE_SUFFIXES = (".txt", ".md", ".jinja", ".j2", ".jinja2", ".prompt")
_INSTRUCTIONS = ("system", "developer")


def text_or_file(value: str, option: str) -> str:
    """The template that `option` names: the contents of a file of that name, else the text itself.

    Raises InputUnreadable for the name of a file that is not there, or of one that is no text.
    """
    path = Path(value)
    try:
        is_file = "\n" not in value and path.is_file()
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return _read(path, option).removesuffix("\n")
    if path.suffix in _FILE_SUFFIXES and not any(character.isspace() for character in value):
        raise InputUnreadable(f"{option} {value}: no such file; give a file, or the text itself")
    return value


def read_schema(path: Path) -> str:
    """The JSON schema in a file, checked as a row's would be. Raises InputUnreadable, MissingExtra."""
    try:
        schema = json.dumps(parse_object(_read(path, "--schema").encode()), separators=(",", ":"))
        compile_schema(schema)
    except InvalidRow as error:
        raise InputUnreadable(f"--schema {path} is not a JSON schema: {error.failure.message}") from None
    except SchemaError as error:
        raise InputUnreadable(f"--schema {path} is refused: {error}") from None
    return schema


def _read(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_NBYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputUnreadable(f"{option} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputUnreadable(f"{option} {path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    if len(data) > _MAX_FILE_NBYTES:
        raise InputUnreadable(f"{option} {path} has more than 1 MiB; give a shorter one")
    return text


class Template:
    """One jinja2 template over the fields of a row; null is empty, and a field that a row lacks is an error of it."""

    def __init__(self, text: str, option: str) -> None:
        """Raises BadArgument for text that is no template."""
        from jinja2 import TemplateSyntaxError, meta

        self._option = option
        environment = _environment()
        try:
            self.fields = frozenset(meta.find_undeclared_variables(environment.parse(text)))
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise BadArgument(f"{option}: {error.message} in line {error.lineno} of the template") from None

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises `InvalidRow` where the row lacks a field of the template, or the template fails on it."""
        from jinja2 import UndefinedError

        for name in sorted(self.fields - values.keys()):
            raise InvalidRow(ErrorCode.MISSING_PARAMETER, f"{self._option} uses {name}; {_found(values)}", name)
        try:
            return self._bounded(values)
        except UndefinedError as error:
            raise InvalidRow(ErrorCode.MISSING_PARAMETER, f"{self._option}: {error.message}", "prompt") from None
        except InvalidRow:
            raise
        except Exception as error:
            # Whatever a template does with a value: it is an error of this row alone.
            message = f"{self._option} failed on this row: {type(error).__name__}: {str(error)[:200]}"
            raise InvalidRow(ErrorCode.INVALID_VALUE, message, "prompt") from None

    def _bounded(self, values: Mapping[str, Any]) -> str:
        pieces, nchars = [], 0
        for piece in self._template.generate(dict(values)):
            nchars += len(piece)
            if nchars > MAX_RENDERED:
                message = f"{self._option} writes more than {MAX_RENDERED >> 20} MiB for this row"
                raise InvalidRow(ErrorCode.INVALID_VALUE, message, "prompt")
            pieces.append(piece)
        return "".join(pieces)


def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, autoescape=False, finalize=lambda value: "" if value is None else value
    )
    # jinja2's own filter escapes HTML, which would alter a prompt.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    # A prompt must not depend on chance.
    environment.filters.pop("random")
    return environment


class Columns:
    """What the settings of a job make of its short rows. Batch lines are left as they are."""

    def __init__(self, defaults: Defaults) -> None:
        """Raises BadArgument for settings that contradict each other, and for a text that is no template."""
        if defaults.prompt is not None and defaults.prompt_column is not None:
            raise BadArgument("--prompt and --prompt-column are both given; use {{ COLUMN }} in --prompt instead")
        self._column = defaults.prompt_column
        self._id_column = defaults.id_column
        self._prompt = None if defaults.prompt is None else Template(defaults.prompt, "--prompt")
        self._system = None if defaults.system is None else Template(defaults.system, "--system")
        self._chat = bool(defaults.chat)
        self._used = frozenset().union(*(each.fields for each in (self._prompt, self._system) if each is not None))
        if self._prompt is not None and not self._prompt.fields:
            raise BadArgument(
                f"--prompt {shown(defaults.prompt)} is no file and uses no column, so every row would be the same; "
                "write {{ COLUMN }} where the row's text belongs"
            )
        if self._system is not None and defaults.chat is False:
            raise BadArgument(
                "--system needs messages, and prompts are continued as they are here (--no-chat, or a model without a "
                "chat template); put the instruction into --prompt"
            )

    @property
    def make_prompts(self) -> bool:
        """Whether prompts come from a column or a template: then any object is a short row."""
        return self._prompt is not None or self._column is not None

    @property
    def id_field(self) -> str:
        return self._id_column or "id"

    def refuse_without_id(self, values: Mapping[str, Any]) -> None:
        """Raises `InvalidRow` where the column that the user named is not there: its rows would be named by lines."""
        if self._id_column is not None and self._id_column not in values:
            message = f"the column {self._id_column[:64]!a} of --id-column is missing from this row; {_found(values)}"
            raise InvalidRow(ErrorCode.MISSING_PARAMETER, message, self._id_column[:64])

    def own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a short row that its answer repeats."""
        own = short_own(values)
        own |= {name: values[name] for name in values if name not in own and self._is_own(name)}
        return {name: value for name, value in own.items() if name != self._column}

    def body(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a short row as if it had been written for moedge. Raises `InvalidRow`."""
        body = {
            name: value
            for name, value in values.items()
            if name not in (self._column, self.id_field) and not self._is_own(name)
        }
        if self.make_prompts:
            if body.get("messages") is not None:
                message = "the row has messages, and a prompt is made of its columns; leave one of them out"
                raise InvalidRow(ErrorCode.INVALID_VALUE, message, "messages")
            body["prompt"] = self._text(values)
        if self._chat:
            self._converse(body, values)
        return body

    def _is_own(self, name: str) -> bool:
        """Names that would be slips, or fields, but were given a meaning by the settings."""
        if name in (self._id_column, self._column):
            return name != "id"
        if name == "id":
            return self._id_column is not None
        return name in self._used and name not in ("prompt", "messages") and name not in short_own({name: None})

    def _text(self, values: Mapping[str, Any]) -> str:
        if self._prompt is not None:
            return self._prompt.render(values)
        assert self._column is not None
        text = values.get(self._column)
        if text is None:
            what = "is null in" if self._column in values else "is missing from"
            message = f"the column {self._column[:64]!a} of --prompt-column {what} this row; {_found(values)}"
            raise InvalidRow(ErrorCode.MISSING_PARAMETER, message, self._column[:64])
        if not isinstance(text, str):
            message = f"the column {self._column[:64]!a} of --prompt-column must be text, found {shown(text)}"
            raise InvalidRow(ErrorCode.INVALID_TYPE, message, self._column[:64])
        return text

    def _converse(self, body: dict[str, Any], values: Mapping[str, Any]) -> None:
        """Makes a message of the prompt, and puts the instruction before messages that have none."""
        if isinstance(body.get("prompt"), str) and body.get("messages") is None:
            if not body["prompt"]:
                raise InvalidRow(ErrorCode.INVALID_VALUE, "the prompt is empty: there is nothing to answer", "prompt")
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        messages = body.get("messages")
        if self._system is None or not isinstance(messages, list):
            return
        if not any(isinstance(each, dict) and each.get("role") in _INSTRUCTIONS for each in messages):
            body["messages"] = [{"role": "system", "content": self._system.render(values)}, *messages]


def _found(values: Mapping[str, Any]) -> str:
    names = ", ".join(ascii(name[:32]) for name in list(values)[:8])
    return f"the row has {names}" if names else "the row is empty"


# The field of a line of plain text.
TEXT_COLUMN = "text"


def settled(defaults: Defaults, plain_text: bool, has_template: bool) -> Defaults:
    """What is left open, as the input and the model are: which column is the prompt, and whether it becomes a message.

    Prompts become messages of a user where they come from columns and the model has a chat template. Raises
    BadArgument for settings that contradict each other.
    """
    if plain_text and defaults.prompt is None and defaults.prompt_column is None:
        defaults = replace(defaults, prompt_column=TEXT_COLUMN)
    made = defaults.prompt_column is not None or defaults.prompt is not None or defaults.system is not None
    if defaults.chat is None and made:
        defaults = replace(defaults, chat=has_template)
    Columns(defaults)
    return defaults
