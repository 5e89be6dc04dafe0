"""The dialect chat templates are written in: jinja2's immutable sandbox with what transformers adds to it.

Stops a template from reaching Python's internals; does not bound its time or memory. jinja2 is used directly because
importing transformers' renderer takes ten times as long, and its hardening differs between supported versions.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def template_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """An environment in which `strftime_now` always says `now`, so that a job's prompts survive midnight."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime(now)
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _Dict()
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what a trainer learns from; in a prompt it is a scope and nothing else."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Namespace(Namespace):
    """jinja2's `namespace`, closed to underscored names, which would let a template plant attributes."""

    # The first parameter has no name, so that a template may write `namespace(self=...)`.
    def __init__(*args: Any, **values: Any) -> None:
        attributes = dict(*args[1:], **values)
        for name in attributes:
            _refuse_underscored(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscored(name)
        super().__setitem__(name, value)


class _Dict:
    """Stands for `dict` without being the class, whose attributes lead further."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_underscored(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the underscored name {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime(now: datetime) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        return now.strftime(format)

    return strftime_now


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which would alter a prompt.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
