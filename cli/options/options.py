"""The parameters of commands, made of the declarations of their options; and the options that only commands have.

`@command(KIND)` gives a function that takes `**given: Unpack[KIND]` a parameter for each option of KIND, as typer wants
them.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import typer

from ...offload.budget import BadSize, parse_size
from ...runtime.settings.option import Option, Panel, Takes, options_of
from . import paths

F = TypeVar("F", bound=Callable[..., None])
# More bytes than `auto` keeps free on any machine.
_ANY_MACHINE = 1 << 62

MODEL = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A checkpoint folder, prepared weights, or a hub id like Qwen/Qwen3-30B-A3B."),
]


class ViewOptions(TypedDict, total=False):
    """What a job shows of itself."""

    summary: Annotated[
        Path | None,
        Option("Write a summary of the run to this file, as JSON.", panel=Panel.OUTPUT, takes=Takes.OWN_FILE),
    ]
    progress: Annotated[
        Literal["auto", "bar", "plain", "none"],
        Option(
            "auto is a progress bar on a terminal, plain lines elsewhere.", "auto", panel=Panel.OUTPUT, file_only=True
        ),
    ]
    output_format: Annotated[
        Literal["human", "json"],
        Option(
            "json prints events on stdout, one per line: docs/reference.md.",
            "human",
            flags=("--format",),
            panel=Panel.OUTPUT,
        ),
    ]
    verbose: Annotated[
        bool, Option("Print all numbers of the run at its end.", False, flags=("--verbose", "-v"), panel=Panel.OUTPUT)
    ]
    quiet: Annotated[
        bool, Option("Print errors only.", False, flags=("--quiet", "-q"), panel=Panel.OUTPUT, common=True)
    ]


def command(kind: type, **changed: dict[str, Any]) -> Callable[[F], F]:
    """A decorator that makes the options of `kind` parameters of a command; `changed` are fields that are other ones
    here, by name of the option: another default, or its flag."""
    found = {name: replace(each, **changed.get(name, {})) for name, each in options_of(kind).items()}

    def declare(function: F) -> F:
        # Typer evaluates annotations of functions, but not those of a signature that was set.
        signature = inspect.signature(function, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*own, *map(_parameter, found.values())]
        # Those that must be given come first.
        parameters.sort(key=lambda each: each.default is not inspect.Parameter.empty)
        plain = [each.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in parameters]
        function.__signature__ = signature.replace(parameters=plain)  # type: ignore[attr-defined]
        function.options = found  # type: ignore[attr-defined]
        return function

    return declare


def _parameter(option: Option) -> inspect.Parameter:
    declared = typer.Option(
        *(option.flags or (option.flag,)),
        envvar=option.variable,
        show_envvar=False,
        metavar=option.metavar,
        min=option.low,
        max=option.high,
        parser={Takes.SIZE: _size, Takes.JSON: _kwargs}.get(option.takes) if option.takes else None,
        callback=_CALLBACKS.get(option.takes) if option.takes else None,
        rich_help_panel=option.panel,
        help=option.help,
        hidden=option.file_only,
    )
    default = inspect.Parameter.empty if option.default is ... else option.default
    annotation = Annotated[_typed(option), declared]  # type: ignore[valid-type]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typed(option: Option) -> Any:
    """The type that typer makes of what was typed: the most special one that the option takes."""
    is_path = Path in option.types and (option.takes in _CALLBACKS or str not in option.types)
    texts = [each for each in (list[str], Path if is_path else str, str) if each in option.types]
    chosen: Any = [*texts, *option.types][0]
    return chosen | None if option.optional or option.default is None else chosen


_CALLBACKS: dict[Takes, Callable[[Path | None], Path | None]] = {
    Takes.INPUT: paths.readable_file,
    Takes.OUTPUT: paths.writable_file,
    Takes.NEW_FILE: paths.new_file,
    Takes.OWN_FILE: paths.own_file,
    Takes.FOLDER: paths.new_folder,
}


def _size(text: str) -> str:
    """Checks a size and returns its text; its bytes depend on the machine."""
    try:
        parse_size(text, _ANY_MACHINE, _ANY_MACHINE)
    except BadSize as error:
        raise typer.BadParameter(str(error)) from None
    return text


def _kwargs(text: str) -> str:
    """Checks variables of a chat template and returns their text in one spelling."""
    from ...runtime.rows.fields import kwargs_setting
    from ...runtime.settings.errors import SettingError

    try:
        return kwargs_setting(text)
    except SettingError as error:
        raise typer.BadParameter(str(error)) from None


def say_device(gpu_mem: str | int = "auto", wanted: bool = True) -> None:
    """Says on stderr which device computes under `--gpu-mem`: the first line of a command, before slow imports."""
    from ...runtime.settings.computing import computing_line

    line = computing_line(str(gpu_mem))
    if wanted:
        with suppress(OSError):
            say(line)


def say(text: str) -> None:
    """Prints to stderr at once, wrapped at spaces on a terminal. Raises OSError."""
    from ...runtime.settings.formatting import fit

    print(fit(text, shutil.get_terminal_size().columns if sys.stderr.isatty() else None), file=sys.stderr, flush=True)
