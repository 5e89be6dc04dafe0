"""`moedge config`: shows effective settings and where each comes from."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.settings.option import options_of
from .batch import BatchCommand
from .options.configured_command import (
    DEFAULT,
    PROJECT_FILE,
    ConfigError,
    Setting,
    config_paths,
    configured_commands,
)
from .options.paths import readable_file, writable_file

app = typer.Typer(help="Show effective settings and where each comes from.", no_args_is_help=True)

# The planner decides these from the measured speeds of this machine, unless the user sets them.
_PLANNED = {"quant", "kv", "tokens-per-pass", "max-sequences"}


@app.command()
def show(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="With the [profile.NAME] settings of moedge.toml.")
    ] = None,
) -> None:
    """Print every setting with its origin: a variable, a line of a file, the machine profile, or the default.

    A flag on the command line overrides all of them. Settings that differ by command are listed for each.
    """
    measured = _profile_origin()
    rows = [
        {"commands": commands, "key": setting.key, "value": _plain(setting.shown), "origin": _origin(setting, measured)}
        for setting, commands in _settings(ctx, profile).items()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    ambiguous = {row["key"] for number, row in enumerate(rows) if row["key"] in [each["key"] for each in rows[:number]]}
    for row in rows:
        who = f"  [{', '.join(row['commands'])}]" if row["key"] in ambiguous else ""
        print(f"{row['key']:16} {_text(row['value']):12} {row['origin']}{who}")


@app.command()
def init(
    from_plan: Annotated[
        Path | None,
        typer.Option(
            "--from-plan",
            callback=readable_file,
            help="Take budgets and formats from a plan: `moedge plan --save`.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", callback=writable_file, help="The file to write.")] = Path(
        PROJECT_FILE
    ),
    for_machine: Annotated[
        bool, typer.Option("--for-machine", help="Put the settings in a table that counts on this machine only.")
    ] = False,
) -> None:
    """Write a moedge.toml with comments, to be edited. Overwrites nothing."""
    from .views.config_template import config_template

    found = None if from_plan is None else _plan_document(from_plan)
    text = config_template(options_of(BatchCommand).values(), found, socket.gethostname() if for_machine else None)
    try:
        with output.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} exists already; give another --output, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    print(f"{output} written; `moedge config show` says what counts now")


def _plan_document(path: Path) -> dict[str, Any]:
    from ..runtime.plan.plan_file import read_plan_file

    return read_plan_file(path)


@app.command()
def path() -> None:
    """Print the settings files in the order in which they are read; the last one wins."""
    for file in config_paths():
        print(f"{file.absolute()}{'' if file.exists() else '  (does not exist)'}")


def _settings(ctx: Any, profile: str | None) -> dict[Setting, list[str]]:
    """Every setting once, with the commands that it serves."""
    found: dict[Setting, list[str]] = {}
    for name, command in configured_commands(ctx.find_root().command).items():
        for setting in command.settings(ctx, profile):
            found.setdefault(setting, []).append(name)
    return dict(sorted(found.items(), key=lambda item: (item[0].key, item[1])))


def _origin(setting: Setting, profile: str | None) -> str:
    if setting.origin != DEFAULT or setting.key not in _PLANNED or setting.value not in (None, "auto"):
        return setting.origin
    return f"{profile or DEFAULT}: chosen by the planner"


def _profile_origin() -> str | None:
    """The name of the machine profile in the table; None if this machine was not measured."""
    from ..offload.store.stores import default_root
    from ..runtime.calibration.machine_profile import saved_profile

    profile = saved_profile(default_root())
    return None if profile is None else f"machine profile of {profile.measured_at[:10]}"


def _text(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)
