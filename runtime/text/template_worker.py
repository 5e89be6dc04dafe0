"""The process in which a chat template runs: `python -m moedge.runtime.text.template_worker`.

Reads frames from stdin, answers on stdout, ends with its parent. Once ready it can open no file and no socket.
"""

import importlib
import resource
import signal
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template

from .bounds import output_limit
from .frames import pack, read_body, unpack
from .sandbox import template_environment

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
    """Gives up for good: more than 1 GiB beyond the memory in use, files, sockets, core dumps."""
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space = pages * resource.getpagesize() + _EXTRA_ADDRESS_SPACE_NBYTES
    for limit, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(limit, (value, value))


class Program:
    """One chat template and the values that are the same in every render."""

    def __init__(self, source: str, special_tokens: dict[str, Any], now: datetime) -> None:
        self._source = source
        self._values = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens}
        self._environment = template_environment(now)
        self._template: Template | None = None

    def answer(self, body: bytes) -> dict[str, str]:
        """Either `text` or `error`; nothing a template raises passes through."""
        try:
            return {"text": self._render(unpack(body), output_limit(len(body)))}
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
            return {"error": message.encode(errors="replace").decode()}

    def _render(self, messages: list[Any], limit: int) -> str:
        # Compiling folds constants, so it can run as wild as rendering: it happens inside the first timed request.
        if self._template is None:
            self._template = self._environment.from_string(self._source)
        return bounded_text(self._template.generate({**self._values, "messages": messages}), limit)


def bounded_text(chunks: Iterable[str], limit: int) -> str:
    """The joined chunks; raises OverflowError as soon as they exceed `limit` bytes of UTF-8."""
    kept = []
    for chunk in chunks:
        limit -= len(chunk.encode())
        if limit < 0:
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
