"""The process in which a chat template runs: `python -m moedge.runtime.text.template_worker`.

Reads frames from stdin, answers on stdout, ends with its parent. Once ready it can open no file and no socket.
"""

import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .confinement import shut_in
from .control_tokens import output_limit
from .template import pack, read_body, unpack


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
    """Replaces `dict` without being the class, whose attributes lead further."""

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


_EXTRA_ADDRESS_SPACE_NBYTES = 1 << 30
_ERROR_LENGTH = 500
# Python and jinja2 load these when they first need them, which after `confine` would be too late.
_LATE_IMPORTS = (
    "encodings.ascii",
    "encodings.unicode_escape",
    "html",
    "jinja2.constants",
    "jinja2.debug",
    "pprint",
    "textwrap",
)


def confine() -> None:
    """Gives up for good: more than 1 GiB beyond the memory in use, files, sockets, other processes."""
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    shut_in(_EXTRA_ADDRESS_SPACE_NBYTES, 3, modules=False)


class Program:
    """One chat template and the values that are the same in every render."""

    def __init__(self, source: str, special_tokens: dict[str, Any], now: datetime) -> None:
        self._source = source
        self._values = {"documents": None, "add_generation_prompt": True, **special_tokens}
        self._environment = template_environment(now)
        self._template: Template | None = None

    def answer(self, body: bytes) -> dict[str, str]:
        """Either `text` or `error`; nothing a template raises passes through."""
        try:
            return {"text": self._render(unpack(body), output_limit(len(body)))}
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
            return {"error": message.encode(errors="replace").decode()}

    def _render(self, request: dict[str, Any], most_nbytes: int) -> str:
        # Compiling folds constants, so it can run as wild as rendering: it happens inside the first timed request.
        if self._template is None:
            self._template = self._environment.from_string(self._source)
        values = {**request["variables"], **self._values, "tools": request["tools"], "messages": request["messages"]}
        return bounded_text(self._template.generate(values), most_nbytes)


def bounded_text(chunks: Iterable[str], most_nbytes: int) -> str:
    """The joined chunks; raises OverflowError as soon as they exceed `most_nbytes` bytes of UTF-8."""
    kept = []
    for chunk in chunks:
        most_nbytes -= len(chunk.encode())
        if most_nbytes < 0:
            raise OverflowError("the rendered prompt is far larger than its messages")
        kept.append(chunk)
    return "".join(kept)


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_body(source)
    if first is None:
        return
    hello = unpack(first)
    program = Program(hello["source"], hello["special_tokens"], datetime.fromisoformat(hello["now"]))
    confine()
    sink.write(pack({"ready": True}))
    sink.flush()
    while (body := read_body(source)) is not None:
        # The parent keeps the limit; the alarm ends an endless render whose parent is gone.
        signal.setitimer(signal.ITIMER_REAL, hello["alarm_s"])
        sink.write(pack(program.answer(body)))
        sink.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
