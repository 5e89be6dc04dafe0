"""Rows with columns of the user's own to short rows: which column is the prompt or the id, and prompts from templates.

Templates are the user's own words, rows are anybody's: a template runs in jinja2's sandbox, row text is only ever a
value in it, and what it writes is bounded. The settings are fields of `Defaults`, so they belong to a job's identity.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings.errors import InputUnreadable, SettingError, shown
from .failure import ErrorCode, InvalidRow
from .row import Defaults
from .row_formats import short_own

if TYPE_CHECKING:
    from jinja2 import Environment

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
    from ..sampling.grammar import SchemaError, compile_schema
    from .strict_json import parse_object

    try:
        schema = json.dumps(parse_object(_read(path, "--schema").encode()), separators=(",", ":"))
        compile_schema(schema)
    except InvalidRow as error:
        raise InputUnreadable(f"--schema {path} is not a JSON schema: {error.failure.message}") from None
    except SchemaError as error:
        raise InputUnreadable(f"--schema {path} is refused: {error}") from None
    return schema


def rows_as(
    defaults: Defaults,
    prompt_column: str | None,
    id_column: str | None,
    prompt: str | None,
    system: str | None,
    schema: Path | None,
    chat: bool | None,
) -> Defaults:
    """The defaults of rows, with what their prompts are made of. Raises InputUnreadable, MissingExtra."""
    return replace(
        defaults,
        prompt_column=prompt_column,
        id_column=id_column,
        prompt=None if prompt is None else text_or_file(prompt, "--prompt"),
        system=None if system is None else text_or_file(system, "--system"),
        schema=None if schema is None else read_schema(schema),
        chat=chat,
    )


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
        """Raises SettingError for text that is no template."""
        from jinja2 import TemplateSyntaxError, meta

        self._option = option
        environment = _environment()
        try:
            self.fields = frozenset(meta.find_undeclared_variables(environment.parse(text)))
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise SettingError(f"{option}: {error.message} in line {error.lineno} of the template") from None

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
        """Raises SettingError for settings that contradict each other, and for a text that is no template."""
        if defaults.prompt is not None and defaults.prompt_column is not None:
            raise SettingError("--prompt and --prompt-column are both given; use {{ COLUMN }} in --prompt instead")
        self._column = defaults.prompt_column
        self._id_column = defaults.id_column
        self._prompt = None if defaults.prompt is None else Template(defaults.prompt, "--prompt")
        self._system = None if defaults.system is None else Template(defaults.system, "--system")
        self._chat = bool(defaults.chat)
        self._used = frozenset().union(*(each.fields for each in (self._prompt, self._system) if each is not None))
        if self._prompt is not None and not self._prompt.fields:
            raise SettingError(
                f"--prompt {shown(defaults.prompt)} is no file and uses no column, so every row would be the same; "
                "write {{ COLUMN }} where the row's text belongs"
            )
        if self._system is not None and defaults.chat is False:
            raise SettingError(
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
    SettingError for settings that contradict each other.
    """
    if plain_text and defaults.prompt is None and defaults.prompt_column is None:
        defaults = replace(defaults, prompt_column=TEXT_COLUMN)
    made = defaults.prompt_column is not None or defaults.prompt is not None or defaults.system is not None
    if defaults.chat is None and made:
        defaults = replace(defaults, chat=has_template)
    Columns(defaults)
    return defaults
