"""Reads back what `dataclasses.asdict` and `json` wrote, strictly by the types of the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


def read_as(kind: Any, value: Any) -> Any:
    """`value`, as `json` read it, as a `kind`: a dataclass, a NamedTuple (which is a list in JSON), `tuple[T, ...]`,
    `Mapping[str, T]`, `T | None` or a scalar.

    `Annotated[T, check]` is a T for which `check` is true. Raises ValueError, TypeError or KeyError for anything else.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        types = _types(kind)  # type: ignore[arg-type]
        return kind(**{name: read_as(types[name], each) for name, each in dict(value).items()})  # type: ignore[operator]
    if hasattr(kind, "_fields"):
        return kind(*(read_as(each, part) for each, part in zip(_types(kind).values(), value, strict=True)))
    if origin in {Union, UnionType}:
        return None if value is None else read_as(arguments[0], value)
    if origin is tuple and type(value) in {list, tuple}:
        return tuple(read_as(arguments[0], each) for each in value)
    if origin is Mapping and type(value) is dict:
        key, kind = arguments
        return {key(name): read_as(kind, each) for name, each in value.items()}
    if origin is Annotated:
        kind, check = arguments
        found = read_as(kind, value)
        if check(found):
            return found
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{value!r} was found; wanted {kind}")


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
