"""The parameters of commands, made of the declarations of their options; and the options that only commands have.

`@command(KIND)` gives a function that takes `**given: Unpack[KIND]` a parameter for each option of KIND, as typer wants
them. Options that take a path are checked before any work begins, so that no job fails at its end for a typing error.
"""

import inspect
import os
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

# What the files that commands write begin with, as far as their own layouts go.
_OURS = (b'"schema": "moedge.', b"<!-- a report of moedge -->")
_HEAD_NBYTES = 256


def writable_file(path: Path | None) -> Path | None:
    """Refuses a name in a folder that is not there or not writable, and the name of a folder."""
    if path is None or str(path) == "-":
        return path
    try:
        folder = path.parent
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; give a file name in it")
        if not folder.is_dir():
            raise typer.BadParameter(f"the folder {folder} does not exist; create it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise typer.BadParameter(f"the folder {folder} is not writable; choose another file")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be written ({error}); choose another file") from None
    return path


def new_file(path: Path | None) -> Path | None:
    """The same, and refuses every file that exists."""
    if writable_file(path) is not None and os.path.lexists(path or ""):
        raise typer.BadParameter(f"{path} exists and is not overwritten; move it away or choose another file")
    return path


def own_file(path: Path | None) -> Path | None:
    """The same, but a file that moedge wrote is replaced."""
    if writable_file(path) is None or path is None or not os.path.lexists(path):
        return path
    if not path.is_file() or not any(mark in _head(path) for mark in _OURS):
        raise typer.BadParameter(
            f"{path} exists and was not written by moedge: it is not overwritten; move it away or choose another file"
        )
    return path


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_NBYTES)
    except OSError:
        return b""


def new_folder(path: Path | None) -> Path | None:
    """Refuses a file; the folder may exist, and its nearest existing parent must be writable."""
    if path is None:
        return None
    try:
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not existing.is_dir():
            raise typer.BadParameter(f"{existing} is a file, wanted a folder; choose another name")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise typer.BadParameter(f"the folder {existing} is not writable; choose another one")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be a folder ({error}); choose another name") from None
    return path


def readable_file(path: Path | None) -> Path | None:
    """Refuses what is missing, a folder, or not readable."""
    if path is None:
        return None
    try:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder, wanted a file")
        with path.open("rb"):
            return path
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{path} cannot be read: {reason}") from None


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
    Takes.INPUT: readable_file,
    Takes.OUTPUT: writable_file,
    Takes.NEW_FILE: new_file,
    Takes.OWN_FILE: own_file,
    Takes.FOLDER: new_folder,
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
    from ...computing import computing_line

    line = computing_line(str(gpu_mem))
    if wanted:
        with suppress(OSError):
            say(line)


def say(text: str) -> None:
    """Prints to stderr at once, wrapped at spaces on a terminal. Raises OSError."""
    from ...formatting import fit

    print(fit(text, shutil.get_terminal_size().columns if sys.stderr.isatty() else None), file=sys.stderr, flush=True)
