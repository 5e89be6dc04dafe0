"""What the options of a call or a command ask for (runtime/settings/options.py), as the objects that do it.

`options` maps their names to values; names that a function does not use are ignored, and absent ones have their
defaults. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...moe.streaming_order import ExpertOptions, Mode
from ..jobs.stop import Limits
from ..rows.columns import rows_as
from ..rows.fields import kwargs_setting
from ..rows.row import Defaults
from ..rows.tables import InputFormat
from ..settings.budgets import Budgets
from ..settings.errors import BadArgument, SettingError
from ..settings.option import options_of
from ..settings.options import BatchOptions, Size, WorkloadOptions
from ..settings.settings import Settings

_DEFAULTS = {name: option.default for name, option in options_of(BatchOptions).items()}
# What is planned for where no rows are known, as by `moedge plan`.
EQUAL_ROWS = {name: option.default for name, option in options_of(WorkloadOptions).items()}


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Those of the options that say how a model is computed."""
    return Settings(**{name: options[name] for name in Settings.__dataclass_fields__ if name in options})


def budgets_of(options: Mapping[str, Any]) -> Budgets:
    """Those of the options that say with what memory."""
    sizes = {name: _text(options[name]) for name in ("ram", "gpu_mem", "disk") if name in options}
    folder = options.get("disk_dir")
    return Budgets(**sizes, disk_dir=None if folder is None else Path(folder))


def experts_of(options: Mapping[str, Any]) -> ExpertOptions:
    """Those of the options that say how experts are streamed."""
    stream = options.get("stream", "auto")
    return ExpertOptions(None if stream == "auto" else Mode(stream))


def limits_of(options: Mapping[str, Any]) -> Limits:
    """Those of the options that say when a job stops early."""
    failures = options.get("max_failures")
    return Limits(options.get("until"), options.get("max_rows"), None if failures is None else str(failures))


def input_format_of(options: Mapping[str, Any]) -> InputFormat:
    """The one of the options that says what the input file is."""
    return InputFormat(options.get("input_format", "auto"))


def row_defaults_of(options: Mapping[str, Any]) -> Defaults:
    """What rows get that do not say it, and what their prompts are made of.

    Raises InputUnreadable, MissingExtra, BadArgument.
    """
    given = {**_DEFAULTS, **options}
    defaults = Defaults(
        max_tokens=given["max_tokens"],
        temperature=given["temperature"] or 0.0,
        seed=given["seed"],
        max_thinking_tokens=given["max_thinking_tokens"],
        chat_template_kwargs=_template_variables(given["chat_template_kwargs"]),
        reasoning_effort=given["reasoning_effort"],
    )
    prompt, system, schema = options.get("prompt"), options.get("system"), options.get("schema")
    return rows_as(
        defaults,
        options.get("prompt_column"),
        options.get("id_column"),
        None if prompt is None else str(prompt),
        None if system is None else str(system),
        None if schema is None else Path(schema),
        options.get("chat"),
    )


def _template_variables(given: str | Mapping[str, Any] | None) -> str:
    """What chat templates get for every row, as the text of a JSON object. Raises BadArgument."""
    if given is None:
        return ""
    try:
        text = given if isinstance(given, str) else json.dumps(given)
        return kwargs_setting(text, "chat_template_kwargs")
    except (SettingError, TypeError, ValueError) as error:
        raise BadArgument(f"chat_template_kwargs must be an object of JSON: {error}") from None


def _text(size: Size) -> str:
    """As the command line takes it."""
    if isinstance(size, int):
        return f"{size}B" if size else "0"
    return size
