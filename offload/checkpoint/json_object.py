"""Parses one JSON object of an untrusted file, more strictly than Python's parser does. Torch-free."""

from __future__ import annotations

import codecs
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never


def load_object(data: bytes) -> dict[str, Any]:
    """Parses `data`. Raises ValueError, which says what was found, unless it is one UTF-8 object with unique keys."""
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it starts with a byte order mark; save it without one")
    try:
        text = data.decode("utf-8")
        value = _QUICK.decode(text)
        if _num_pairs(value) != data.count(b":"):
            value = _STRICT.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was wanted, found {described(value)}")
    return value


def described(value: object) -> str:
    """A short, printable form of a value for a message; the contents of a list or object are left out."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    # The text is cut before it is escaped: escaping a name of several megabytes would make it ten times as long first.
    return f"{value[:60] if isinstance(value, str) else value!a:.60}"


def _num_pairs(value: Any) -> int:
    """The number of names in an object and in the objects directly inside it.

    JSON text has a colon for each name. If it has no more colons than this number, no name was dropped as a duplicate,
    and that is all that has to be shown. Checking every name while it is parsed takes three times as long.
    """
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(len(inner) for inner in value.values() if isinstance(inner, dict))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{described(name)} occurs {count} times, wanted once")
    return unique


def _refuse_constant(literal: str) -> Never:
    raise ValueError(f"{literal} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
# This decoder keeps the last of several values with the same name.
_QUICK = json.JSONDecoder(parse_constant=_refuse_constant)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the garbage collector while many objects without reference cycles, such as tensor entries, are created.

    Otherwise it traverses all of them again and again while their number grows, which takes a third of the time that
    reading the headers of a large checkpoint takes.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
