"""How an option is declared: once, as a field of a TypedDict, from whose type and `Option` everything else follows.

    class SeedOptions(TypedDict, total=False):
        seed: Annotated[int, Option("Seed for rows that do not set one.", default=0, low=0, key=True)]

The parameters of commands and of Python functions, what they accept, the keys of moedge.toml, the variables
`MOEDGE_...`, `moedge config init` and docs/tables/options.md are made of these. Torch-free.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .errors import BadArgument, shown

F = TypeVar("F", bound=Callable[..., Any])
_INT63 = 2**63 - 1


class Panel(StrEnum):
    """The headings under which `--help` lists options."""

    OUTPUT = "Output and progress"
    ROWS = "Rows and prompts"
    BUDGETS = "Memory and disk"
    PRECISION = "Formats and precision"
    SAMPLING = "Sampling, for rows that do not set it"
    STOPPING = "Stopping and resuming"
    TUNING = "Tuning"


class Takes(StrEnum):
    """What a text or a path has to be, beyond its type."""

    SIZE = "a size: bytes, or a text such as 7GiB"
    JSON = "a JSON object of variables of a chat template"
    INPUT = "a file that can be read"
    OUTPUT = "a file that can be written"
    NEW_FILE = "a file that does not exist"
    OWN_FILE = "a file that moedge wrote, or a new one"
    FOLDER = "a folder that exists or can be made"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """What the field of an option says of it."""

    name: str = ""
    type: Any = None


@dataclass(frozen=True, slots=True)
class Option(_Named):
    """An option. `help` is its line in `--help`; `flags` are what is typed, by default the name with dashes.

    Numbers from `low` to `high` are accepted. `choices` are the accepted texts where the type does not list them.
    With `key`, moedge.toml and the environment may set it; with `file_only` nothing else does on a command line.
    `common` options are listed by `--help`, the others by `--help-all`. `example` is a value for `moedge config init`
    where the default is none.
    """

    help: str
    default: Any = None
    flags: tuple[str, ...] = ()
    panel: Panel | None = None
    metavar: str | None = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    takes: Takes | None = None
    key: bool = False
    file_only: bool = False
    common: bool = False
    example: str = ""

    @property
    def flag(self) -> str:
        """The long flag: `--kv`."""
        return max(self.flags, key=len).partition("/")[0] if self.flags else f"--{self.name.replace('_', '-')}"

    @property
    def file_key(self) -> str:
        """The key in moedge.toml; empty where it has none."""
        return self.flag.removeprefix("--") if self.key or self.file_only else ""

    @property
    def variable(self) -> str | None:
        """The environment variable; None where it has none."""
        return f"MOEDGE_{self.file_key.upper().replace('-', '_')}" if self.file_key else None

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that are accepted, without None."""
        if self.choices:
            return (Literal[self.choices],)
        of = (self.type,) if get_origin(self.type) in (Literal, list, Mapping) else get_args(self.type) or (self.type,)
        return tuple(each for each in of if each is not NoneType)

    @property
    def optional(self) -> bool:
        """Whether None is accepted: somebody else sets it then, such as the model, a row or the planner."""
        return NoneType in get_args(self.type)

    @property
    def listed(self) -> tuple[str, ...]:
        """The texts of which it takes one; () where it takes any."""
        return next((get_args(each) for each in self.types if get_origin(each) is Literal), ())

    def wanted(self, value: Any) -> str:
        """What it takes, where `value` is something else; empty where it is fine, or checked by whoever uses it."""
        if value is None:
            return "" if self.optional else self._accepted
        if self.listed:
            return "" if value in self.listed else self._accepted
        kinds = tuple(get_origin(each) or each for each in self.types)
        kinds += (int,) if float in kinds else ()
        if isinstance(value, bool) != (kinds == (bool,)) or not isinstance(value, kinds):
            return self._accepted
        outside = isinstance(value, int | float) and not (self.low or 0) <= value <= (self.high or _INT63)
        return self._accepted if outside else ""

    @property
    def _accepted(self) -> str:
        if self.listed:
            return f"one of {', '.join(self.listed)}"
        if self.takes is Takes.SIZE:
            return 'a number of bytes, or a size such as "7GiB"'
        if float in self.types:
            return f"at least {self.low:g}"
        words = {str: "a string", Path: "a path", bool: "True or False", int: f"a whole number from {self.low or 0:g}"}
        words |= {list: "a list of strings", Mapping: "a dict"}
        return " or ".join(words[get_origin(each) or each] for each in self.types)


def options_of(kind: type) -> dict[str, Option]:
    """The options that a TypedDict declares, by name."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        accepted, option = get_args(hint)
        found[name] = replace(option, name=name, type=accepted)
    return found


def check(options: Mapping[str, Any], kind: type) -> None:
    """Raises BadArgument for an option that `kind`, a TypedDict of options, does not have, or for a wrong value."""
    known = options_of(kind)
    for name, value in options.items():
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
            raise BadArgument(f"{name} is not an option; {advice}")
        if wanted := known[name].wanted(value):
            raise BadArgument(f"{name} must be {wanted}; found {shown(value)}")


def with_options(kind: type) -> Callable[[F], F]:
    """Shows the options of `kind` as keyword parameters of a function that takes them as `**options`.

    `help`, completion and `inspect.signature` then have their names, types and defaults.
    """

    def show(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        shown = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=each.default,
                annotation=Literal[each.choices] if each.choices else each.type,
            )
            for name, each in options_of(kind).items()
        ]  # fmt: skip
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return function

    return show
