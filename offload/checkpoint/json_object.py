"""One JSON object of a file that nobody vouches for, without what Python's parser lets pass."""

from __future__ import annotations

import codecs
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never


def load_object(data: bytes) -> dict[str, Any]:
    """Raises ValueError, saying what was found, for anything but one UTF-8 JSON object with unique keys."""
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it starts with a byte order mark; save it without")
    try:
        text = data.decode("utf-8")
        value = _QUICK.decode(text)
        if _num_pairs(value) != data.count(b":"):
            value = _STRICT.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was wanted, found {described(value)}")
    return value


def described(value: object) -> str:
    """A value for a message: short, printable, and no deeper than its outside."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    # Cut before it is escaped: a name of megabytes would grow tenfold first.
    return f"{value[:60] if isinstance(value, str) else value!a:.60}"


def _num_pairs(value: Any) -> int:
    """Names in an object and in the objects directly inside it.

    A text has a colon for each of its names, so where it has no others, each stands in it once; no more is to be shown.
    Looking at every name as it is parsed takes three times as long.
    """
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(len(inner) for inner in value.values() if isinstance(inner, dict))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{described(name)} stands in it {count} times, wanted once")
    return unique


def _refuse_constant(literal: str) -> Never:
    raise ValueError(f"{literal} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
# Keeps the last of several values with one name.
_QUICK = json.JSONDecoder(parse_constant=_refuse_constant)


@contextmanager
def uncollected() -> Iterator[None]:
    """For making many objects that form no circle, as descriptions of tensors are.

    The collector would look through all of them again and again while they become more: a third of the time that the
    headers of a large checkpoint take.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
