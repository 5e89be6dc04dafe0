"""Settings for many runs: flag before environment before ./moedge.toml before the user's file before
default.

An option takes part by being declared with a key, which is its flag without dashes. docs/reference.md is the page
for people.
"""

import difflib
import os
import re
import socket
import stat
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ...offload.errors import ExitCode, MoedgeError
from ...runtime.settings.option import Option

PROJECT_FILE = "moedge.toml"
# A page of settings is a few kilobytes; anything large was not written for this.
_MOST_NBYTES = 1 << 20


class ConfigError(MoedgeError):
    """A setting is unknown or invalid; the message begins with its origin."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """`command` is "" for a setting that serves every command; `origin` is `FILE:LINE`.

    `table` is "" or the [profile.NAME] or [machine.HOST] that has the setting, such as "profile.night".
    """

    command: str
    key: str
    value: Any
    origin: str
    folder: Path
    table: str = ""

    @property
    def rank(self) -> int:
        """Settings of a higher rank count for more within a file."""
        kind = self.table.partition(".")[0]
        return {"machine": 2, "profile": 3}.get(kind, 1 if self.command else 0)


def config_paths() -> tuple[Path, Path]:
    """The user's file and the one of the current folder, which overrides it."""
    from platformdirs import user_config_path

    return user_config_path("moedge") / PROJECT_FILE, Path(PROJECT_FILE)


def read_entries(path: Path) -> list[ConfigEntry]:
    """Reads a settings file; returns [] if it does not exist. Raises ConfigError."""
    text = _text(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    return list(_entries(document, path, _lines(text)))


def _text(path: Path) -> str:
    try:
        if not stat.S_ISREG((status := os.stat(path)).st_mode) or status.st_size > _MOST_NBYTES:
            raise ConfigError(f"{path}: expected a regular file of at most 1 MiB")
        return path.read_bytes().decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _entries(document: dict[str, Any], path: Path, lines: dict[tuple[str, str], int]) -> Iterator[ConfigEntry]:
    for name, value in document.items():
        if name in CONDITIONAL and isinstance(value, dict):
            for inner, settings in value.items():
                table = f"{name}.{inner}"
                if not isinstance(settings, dict):
                    raise ConfigError(
                        f"{path}: [{name}] wants a table for each name, such as [{name}.{EXAMPLES[name]}]"
                    )
                for key, setting in settings.items():
                    yield _entry("", key, setting, path, lines.get((table, key)), table)
            continue
        command, inner = (name, value) if isinstance(value, dict) else ("", {name: value})
        for key, setting in inner.items():
            yield _entry(command, key, setting, path, lines.get((command, key)))


def _entry(command: str, key: str, value: Any, path: Path, line: int | None, table: str = "") -> ConfigEntry:
    return ConfigEntry(command, key, value, f"{path}:{line}" if line else f"{path}", path.parent, table)


def _lines(text: str) -> dict[tuple[str, str], int]:
    """The line of every key by table. tomllib records no lines; keys of inline tables are not found."""
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if header := re.match(r"\s*\[\s*((?:[\"']?[\w.-]+[\"']?\s*\.?\s*)+)\]", line):
            table = re.sub(r"[\"'\s]", "", header[1])
        elif key := re.match(r"\s*(?:([\w-]+)\s*\.\s*)?[\"']?([\w-]+)[\"']?\s*=", line):
            found.setdefault((key[1] or table, key[2]), number)
    return found


PREFIX = "MOEDGE_"
PROFILE_VARIABLE = "MOEDGE_PROFILE"
# Read by quant/native/library.py.
ISA_VARIABLE = "MOEDGE_ISA"
# Tables that count only where they are asked for by name, and where this machine has the name.
CONDITIONAL = ("profile", "machine")
EXAMPLES = {"profile": "night", "machine": "workstation"}
DEFAULT = "default"
# `jobs resume` resumes what `batch` started; commands that take a single option need no table.
_TABLE = {"resume": "batch", "ls": "", "prune": "", "doctor": ""}
_HELP = {"-h", "--help", "--help-all"}
_ALL, _FOUND = "moedge.help-all", "moedge.settings"
_SECRET = {"api-key"}


@dataclass(frozen=True, slots=True)
class Setting:
    """`origin` is a variable's name, `FILE:LINE` or "default"; `parameter` is the option's name in the command."""

    key: str
    value: Any
    origin: str
    parameter: str

    @property
    def shown(self) -> Any:
        """The value, or stars for one that nobody may read over a shoulder or in a log."""
        return "***" if self.key in _SECRET and self.value is not None else self.value

    def __str__(self) -> str:
        return f"{self.key} {self.shown} ({self.origin})"


class ConfiguredCommand(TyperCommand):
    """A command whose options may be set by files and variables; it prints those that were.

    `--help` lists the options that are declared as common, `--help-all` every one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Adds --profile and --help-all to its options."""
        super().__init__(*args, **kwargs)
        self.declared: dict[str, Option] = getattr(self.callback, "options", {})
        self.params = [*self.params, *_own_options()]

    @property
    def options(self) -> dict[str, Any]:
        """The options that files and variables may set, by key."""
        named = ((str(getattr(option, "envvar", None) or ""), option) for option in self.params)
        return {_key(name): option for name, option in named if name.startswith(PREFIX)}

    @property
    def table(self) -> str:
        """The table of files that is meant for it; "" where there is none."""
        name = self.name or ""
        return _TABLE.get(name, name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        parameters: list[Any] = [] if _ALL in ctx.meta else self.params
        rare = [each for each in parameters if not each.hidden and self._is_rare(each.name)]
        for each in rare:
            each.hidden = True
        super().format_help(ctx, formatter)
        for each in rare:
            each.hidden = False

    def _is_rare(self, name: str) -> bool:
        return name == "profile" or (name in self.declared and not self.declared[name].common)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing or _HELP & set(args):
            return super().parse_args(ctx, args)
        self._refuse_keys(args)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _plain(error.message)
            raise
        used = [each for each in ctx.meta[_FOUND] if ctx.get_parameter_source(each.parameter).name != "COMMANDLINE"]
        if used and not ctx.params.get("quiet") and ctx.params.get("output_format") != "json":
            print(f"settings: {', '.join(map(str, used))}", file=sys.stderr)
        return rest

    def _refuse_keys(self, args: list[str]) -> None:
        """Raises ConfigError for what only files and variables set."""
        keys = {each.flag: each for each in self.declared.values() if each.file_only}
        for flag in (arg.partition("=")[0] for arg in takewhile(lambda arg: arg != "--", args)):
            if flag in keys:
                key, variable = keys[flag].file_key, keys[flag].variable
                raise ConfigError(f"{flag} is no option but a key of moedge.toml: {key} = ...; or set {variable}")

    def settings(self, ctx: Any, profile: str | None = None) -> Iterator[Setting]:
        """Yields every option with its value and origin, without flags, in a profile. Raises ConfigError."""
        commands = configured_commands(ctx.find_root().command)
        _warn_of_unknown_variables(commands)
        profile = profile or os.environ.get(PROFILE_VARIABLE) or None
        found = [_checked(path, commands, ctx) for path in config_paths()]
        _refuse_unknown_profile(profile, [entry for entries in found for entry in entries])
        mine = (entry for entries in found for entry in entries if self._takes(entry, profile))
        entries = {entry.key: entry for entry in mine}
        for key, option in self.options.items():
            variable = option.resolve_envvar_value(ctx)
            if variable is not None:
                _meaning(option, variable, ctx, f"environment: {option.envvar}={variable}")
                yield Setting(key, variable, option.envvar, option.name)
            elif key in entries:
                yield _from_file(entries[key], option)
            else:
                yield Setting(key, option.get_default(ctx), DEFAULT, option.name)

    def _takes(self, entry: ConfigEntry, profile: str | None) -> bool:
        """Whether an entry of a file counts for this command, on this machine, in a profile."""
        kind, _, name = entry.table.partition(".")
        if kind and name != (profile if kind == "profile" else socket.gethostname()):
            return False
        return entry.key in self.options and entry.command in ("", self.table)


def _own_options() -> list[Any]:
    """--profile and --help-all, of a command made for them."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def _(
        profile: Annotated[
            str | None,
            typer.Option(
                "--profile",
                metavar="NAME",
                is_eager=True,
                expose_value=False,
                callback=_read_settings,
                help="Use the [profile.NAME] settings of moedge.toml.",
            ),
        ] = None,
        help_all: Annotated[
            bool,
            typer.Option(
                "--help-all", is_eager=True, expose_value=False, callback=_help_all, help="Show every option and exit."
            ),
        ] = False,
    ) -> None:
        raise AssertionError("never run")

    return [each for each in typer.main.get_command(app).params if each.name in ("profile", "help_all")]


def _read_settings(ctx: typer.Context, profile: str | None) -> None:
    """What files and variables set becomes the defaults of the other parameters, which are read after this one."""
    if not ctx.resilient_parsing:
        assert isinstance(ctx.command, ConfiguredCommand)
        found = [each for each in ctx.command.settings(ctx, profile) if each.origin != DEFAULT]
        ctx.default_map = {each.parameter: each.value for each in found}
        ctx.meta[_FOUND] = found


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[_ALL] = True
        assert isinstance(ctx.command, ConfiguredCommand)
        if keys := sorted(each.file_key for each in ctx.command.declared.values() if each.file_only):
            ctx.command.epilog = f"Keys of moedge.toml without an option: {', '.join(keys)} (docs/tables/options.md)."
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


def configured_commands(root: Any) -> dict[str, ConfiguredCommand]:
    """Maps full names, such as "jobs resume", to commands."""
    found = {}
    for name, command in root.commands.items():
        if isinstance(command, ConfiguredCommand):
            found[name] = command
        elif hasattr(command, "commands"):
            found |= {f"{name} {inner}": each for inner, each in configured_commands(command).items()}
    return found


def _checked(path: Path, commands: Mapping[str, ConfiguredCommand], ctx: Any) -> list[ConfigEntry]:
    """All entries of a file in increasing precedence, checked whichever command they are for."""
    entries = read_entries(path)
    for entry in entries:
        _check(entry, commands, ctx)
    return sorted(entries, key=lambda entry: entry.rank)


def _check(entry: ConfigEntry, commands: Mapping[str, ConfiguredCommand], ctx: Any) -> None:
    tables = {command.table for command in commands.values()} - {""}
    if entry.command and entry.command not in tables:
        tables |= set(CONDITIONAL)
        raise ConfigError(f"{entry.origin}: unknown table [{entry.command}]{_nearest(entry.command, tables)}")
    meant = [command.options for command in commands.values() if entry.command in ("", command.table)]
    keys = {key for options in meant for key in options}
    if entry.key not in keys:
        where = f" of [{entry.table or entry.command}]" if entry.table or entry.command else ""
        raise ConfigError(f"{entry.origin}: unknown key {entry.key!r}{where}{_nearest(entry.key, keys)}")
    for options in meant:
        if entry.key in options:
            _check_value(entry, options[entry.key], ctx)


def _check_value(entry: ConfigEntry, option: Any, ctx: Any) -> None:
    found = f"{entry.origin}: {entry.key} = {_shown(entry.value)}"
    if option.is_flag != isinstance(entry.value, bool):
        raise ConfigError(f"{found}; wanted {'true or false' if option.is_flag else 'a value, not true or false'}")
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
    """Parses a text as the value of an option. Raises ConfigError, which begins with `found`."""
    try:
        return option.process_value(ctx, text)
    except typer.BadParameter as error:
        raise ConfigError(f"{found}; {_plain(error.message)}") from None


def _plain(message: str) -> str:
    """The message without what newer releases of typer take over from pydantic."""
    return message.removeprefix("Value error, ")


def _from_file(entry: ConfigEntry, option: Any) -> Setting:
    value = entry.value
    if _is_path(option):
        value = str(entry.folder / Path(value).expanduser())
    return Setting(entry.key, value, entry.origin, option.name)


_warned: set[str] = set()


def _warn_of_unknown_variables(commands: Mapping[str, ConfiguredCommand]) -> None:
    """Once each: a variable may be another program's, or another version's."""
    known = {option.envvar for command in commands.values() for option in command.options.values()}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in {*known, PROFILE_VARIABLE, ISA_VARIABLE, *_warned}:
            _warned.add(name)
            print(f"warning: unknown variable {name} is ignored{_nearest(name, known)}", file=sys.stderr)


def _refuse_unknown_profile(profile: str | None, entries: list[ConfigEntry]) -> None:
    known = {entry.table.partition(".")[2] for entry in entries if entry.table.startswith("profile.")}
    if profile is not None and profile not in known:
        files = " and ".join(map(str, config_paths()))
        hint = _nearest(profile, known) if known else "; there is no [profile.NAME] table"
        raise ConfigError(f"--profile {profile}: not in {files}{hint}")


def _nearest(name: str, known: Iterable[str]) -> str:
    # The separator is the most frequent mistake, so it is ignored.
    plain = {key.replace("_", "-"): key for key in known}
    near = difflib.get_close_matches(name.replace("_", "-"), plain, n=1)
    return f"; nearest: {plain[near[0]]}" if near else f"; known are {', '.join(sorted(known))}"


def _key(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower().replace("_", "-")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _is_path(option: Any) -> bool:
    return "dir" in option.name.split("_")
