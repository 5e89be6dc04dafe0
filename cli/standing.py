"""Settings that stand for many runs: flag before environment before ./moedge.toml before the user's file before
default.

An option takes part by having an environment variable `MOEDGE_...`; its key in files is that name in small letters
with dashes. docs/configuration.md is the page for people.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from .config_file import ConfigError, Entry, config_paths, read_entries

PREFIX = "MOEDGE_"
DEFAULT = "default"
# What `jobs resume` goes on with was begun by `batch`; commands that take a single option need no table.
_TABLE = {"resume": "batch", "ls": "", "prune": "", "doctor": ""}
_HELP = {"-h", "--help"}


@dataclass(frozen=True, slots=True)
class Setting:
    """`origin` is a variable's name, `FILE:LINE` or "default"; `arguments` are what a person would have typed."""

    key: str
    value: Any
    origin: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key} {self.value} ({self.origin})"


class StandingCommand(TyperCommand):
    """A command whose options may be set outside of the command line; it says which were."""

    @property
    def options(self) -> dict[str, Any]:
        """Its options that may stand, by key."""
        named = ((str(getattr(option, "envvar", None) or ""), option) for option in self.params)
        return {_key(name): option for name, option in named if name.startswith(PREFIX)}

    @property
    def table(self) -> str:
        """The table of files that is meant for it; "" where there is none."""
        name = self.name or ""
        return _TABLE.get(name, name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or _HELP & set(args):
            return super().parse_args(ctx, args)
        given = self.make_parser(ctx).parse_args(args=list(args))[0]
        settings = [
            setting
            for setting in self.settings(ctx)
            if self.options[setting.key].name not in given and setting.origin != DEFAULT
        ]
        rest = super().parse_args(ctx, [*(text for setting in settings for text in setting.arguments), *args])
        if settings and not ctx.params.get("quiet") and ctx.params.get("output_format") != "json":
            print(f"settings: {', '.join(map(str, settings))}", file=sys.stderr)
        return rest

    def settings(self, ctx: Any) -> Iterator[Setting]:
        """What every option is where no flag says otherwise. Raises ConfigError."""
        commands = standing_commands(ctx.find_root().command)
        _refuse_unknown_variables(commands)
        entries = {entry.key: entry for path in config_paths() for entry in _applying(path, self, commands, ctx)}
        for key, option in self.options.items():
            variable = option.resolve_envvar_value(ctx)
            if variable is not None:
                _meaning(option, variable, ctx, f"environment: {option.envvar}={variable}")
                yield Setting(key, variable, option.envvar)
            elif key in entries:
                yield _from_file(entries[key], option)
            else:
                yield Setting(key, option.get_default(ctx), DEFAULT)


def standing_commands(root: Any) -> dict[str, StandingCommand]:
    """By full name, as "jobs resume"."""
    found = {}
    for name, command in root.commands.items():
        if isinstance(command, StandingCommand):
            found[name] = command
        elif hasattr(command, "commands"):
            found |= {f"{name} {inner}": each for inner, each in standing_commands(command).items()}
    return found


def _applying(path: Path, own: StandingCommand, commands: Mapping[str, StandingCommand], ctx: Any) -> list[Entry]:
    """Entries of a file for a command, the stronger ones last. Checks all of them, whomever they are for."""
    entries = read_entries(path)
    for entry in entries:
        _check(entry, commands, ctx)
    mine = [entry for entry in entries if entry.key in own.options and entry.command in ("", own.table)]
    return sorted(mine, key=lambda entry: entry.command != "")


def _check(entry: Entry, commands: Mapping[str, StandingCommand], ctx: Any) -> None:
    tables = {command.table for command in commands.values()} - {""}
    if entry.command and entry.command not in tables:
        raise ConfigError(f"{entry.place}: there is no table [{entry.command}]{_nearest(entry.command, tables)}")
    meant = [command.options for command in commands.values() if entry.command in ("", command.table)]
    keys = {key for options in meant for key in options}
    if entry.key not in keys:
        where = f" of [{entry.command}]" if entry.command else ""
        raise ConfigError(f"{entry.place}: unknown key {entry.key!r}{where}{_nearest(entry.key, keys)}")
    for options in meant:
        if entry.key in options:
            _check_value(entry, options[entry.key], ctx)


def _check_value(entry: Entry, option: Any, ctx: Any) -> None:
    found = f"{entry.place}: {entry.key} = {_shown(entry.value)}"
    if option.is_flag != isinstance(entry.value, bool):
        raise ConfigError(f"{found}; wanted {'true or false' if option.is_flag else 'a value, not a truth'}")
    if not isinstance(entry.value, str | int | float):
        raise ConfigError(f"{found}; wanted one value")
    if option.is_flag:
        return
    meant = _meaning(option, str(entry.value), ctx, found)
    if isinstance(entry.value, str) and isinstance(meant, int | float):
        raise ConfigError(f"{found}; wanted a number, without quotation marks")
    if not isinstance(entry.value, str) and isinstance(meant, str | Path):
        raise ConfigError(f"{found}; wanted text in quotation marks")


def _meaning(option: Any, text: str, ctx: Any, found: str) -> Any:
    """What an option makes of a text. Raises ConfigError, which begins with `found`."""
    try:
        return option.process_value(ctx, text)
    except typer.BadParameter as error:
        raise ConfigError(f"{found}; {error.message}") from None


def _from_file(entry: Entry, option: Any) -> Setting:
    value = entry.value
    if _is_path(option):
        value = str(entry.folder / Path(value).expanduser())
    flag = max(option.opts, key=len)
    arguments = ((flag,) if value else ()) if option.is_flag else (flag, str(value))
    return Setting(entry.key, value, entry.place, arguments)


def _refuse_unknown_variables(commands: Mapping[str, StandingCommand]) -> None:
    known = {option.envvar for command in commands.values() for option in command.options.values()}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"environment: unknown variable {name}{_nearest(name, known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    # The separator is what is most often mistaken, so it counts for nothing.
    plain = {key.replace("_", "-"): key for key in known}
    near = difflib.get_close_matches(name.replace("_", "-"), plain, n=1)
    return f"; nearest: {plain[near[0]]}" if near else f"; known are {', '.join(sorted(known))}"


def _key(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower().replace("_", "-")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _is_path(option: Any) -> bool:
    return "dir" in option.name.split("_")
