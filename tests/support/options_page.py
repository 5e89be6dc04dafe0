"""docs/tables/options.md: the declared options of all commands; `python -m support.options_page` writes it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from moedge.cli.main import app
from moedge.cli.options.configured_command import configured_commands
from moedge.runtime.settings.option import Option

PAGE = Path(__file__).parents[2] / "docs" / "tables" / "options.md"
HEAD = """# Options

Every option of the commands that run models, made of their declarations by `python -m support.options_page` in
`tests/`. `--help` shows those that most people use, `--help-all` all that can be typed. A key is for `moedge.toml`
and, as `MOEDGE_` and the key in capitals with `_` for `-`, for the environment
([configuration](../reference.md#configuration)); what has a key and no option is set there only. Python functions have
the same options by the name in the second column ([Python](../python.md)).
"""


def page() -> str:
    panels: dict[str, list[str]] = {}
    for option, commands in _options():
        panels.setdefault(option.panel or "One command", []).append(_row(option, commands))
    header = "| option | in Python | key | takes | default | commands | |\n|---|---|---|---|---|---|---|"
    sections = [f"## {name}\n\n{header}\n" + "\n".join(rows) + "\n" for name, rows in sorted(panels.items())]
    return "\n".join([HEAD, *sections])


def _options() -> Iterator[tuple[Option, list[str]]]:
    """Every declaration with the commands that have it as it is."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for name, command in configured_commands(get_command(app)).items():
        for option in command.declared.values():
            found.setdefault(repr((option.flag, option.help, option.default, option.file_only)), (option, []))[
                1
            ].append(name)
    yield from sorted(found.values(), key=lambda each: (each[0].flag, each[1]))


def _row(option: Option, commands: list[str]) -> str:
    flags = "" if option.file_only else f"`{', '.join(option.flags or (option.flag,))}`"
    key = f"`{option.file_key}`" if option.file_key else ""
    cells = [flags, f"`{option.name}`", key, _takes(option), _default(option.default), ", ".join(commands), option.help]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _takes(option: Option) -> str:
    if option.listed:
        return ", ".join(f"`{each}`" for each in option.listed)
    if option.takes is not None:
        return str(option.takes)
    if bool in option.types:
        return "on or off"
    if option.low is not None:
        return f"{'a number' if float in option.types else 'a whole number'} from {option.low:g}"
    return "a path" if option.types == (Path,) else "a text"


def _default(value: Any) -> str:
    if value is ...:
        return "must be given"
    return "" if value is None or value is False else f"`{value if isinstance(value, str) else json.dumps(value)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
