"""`moedge config`: shows effective settings and where each comes from, and writes a moedge.toml to begin with, as text:
comments are the point of it, and TOML writers keep none.
"""

import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer

from ..runtime.settings.option import Option, options_of
from ..runtime.shape.shards import FORMATS, KEPT
from .batch import BatchCommand
from .options.configured_command import DEFAULT, PROJECT_FILE, ConfigError, Setting, config_paths, configured_commands
from .options.options import readable_file, writable_file

_MIB = 1 << 20
_BUDGETS = {"host": ("ram", "RAM"), "device": ("gpu-mem", "GPU memory")}
_HEAD = """# Settings of moedge: docs/reference.md. A key is an option without its dashes; remove the # to set it.
# `moedge config show` prints what counts, and `moedge plan MODEL --save plan.json` with
# `moedge config init --from-plan plan.json` writes this file for a machine and a model.
"""
_TABLES = """
# Only for one command.
# [batch]
# max-tokens = 1024

# Overrides everything above, with --profile night or MOEDGE_PROFILE=night.
# [profile.night]
# ram = "90%"

# Counts on the machine with this host name, before all but a profile.
# [machine.workstation]
# gpu-mem = "11GiB"
"""


def config_template(options: Iterable[Option], plan: Mapping[str, Any] | None, host: str | None) -> str:
    """The keys of `options` as comments; with the document of a `plan`, its budgets and formats, in the
    table of machine `host` where one is given."""
    lines = _declared(options) if plan is None else _planned(plan, host)
    return "".join(f"{line}\n" for line in lines)


def _declared(options: Iterable[Option]) -> Iterator[str]:
    """The keys with what they mean, and values that they may have."""
    yield from _HEAD.splitlines()
    for option in options:
        if option.file_key:
            yield from ("", *wrap(option.help, 118, initial_indent="# ", subsequent_indent="# "))
            yield f"# {option.file_key} = {option.example or json.dumps(option.default)}"
    yield from _TABLES.splitlines()


def _planned(plan: Mapping[str, Any], host: str | None) -> Iterator[str]:
    model, machine, chosen = plan["model"], plan["machine"]["hardware"], plan["plan"]
    gpus = "".join(f", {gpu['name']}" for gpu in machine["gpus"])
    yield f"# From a plan for {json.dumps(model['name'])}: {plan['prediction']['generated_tok_s']:,.1f} tok/s expected."
    yield f"# Made for {machine['cpu']}, {machine['cores']} cores, {machine['ram_nbytes'] / 2**30:.1f} GiB{gpus}."
    yield "# docs/reference.md says what else may stand here."
    if host is not None:
        yield ""
        yield "# Counts on this machine only; other machines that share the file have tables of their own."
        yield f"[machine.{json.dumps(host)}]"
    yield ""
    yield "# Budgets, never exceeded. The comments say what the plan uses of each."
    for tier in plan["tiers"]:
        used = sum(tier["parts"].values())
        if tier["tier"] == "disk":
            # It bounds the prepared weights of all models together, so it is for a person to set.
            yield f'# disk = "{-(-used // _MIB)}MiB"  # all prepared weights together; this plan writes as much'
            continue
        key, name = _BUDGETS[tier["tier"]]
        yield f'{key} = "{tier["budget"] // _MIB}MiB"  # {name}: {used / 2**30:.2f} GiB'
    yield ""
    yield "# Formats of weights and KV cache: pinned, so that answers do not change with free memory."
    # The option has one name for all formats in which a checkpoint's own codes are kept.
    quant, _, experts = chosen["quant"].partition("+")
    yield f'quant = "{quant if quant in FORMATS else KEPT}"'
    if experts:
        yield f'experts = "{experts}"'
    yield f'kv = "{chosen["kv"]}"'
    yield f'dtype = "{chosen["dtype"]}"'
    yield ""
    yield "# Chosen from the job and the memory for every run; set them to pin them."
    yield f"# max-sequences = {chosen['max_sequences']}"
    yield f"# tokens-per-pass = {chosen['tokens_per_pass']}"


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
    from ..runtime.plan.plan_file import read_plan_file

    found = None if from_plan is None else read_plan_file(from_plan)
    text = config_template(options_of(BatchCommand).values(), found, socket.gethostname() if for_machine else None)
    try:
        with output.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{output} exists already; give another --output, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
    print(f"{output} written; `moedge config show` says what counts now")


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
