"""JSON schemas for answers: from a file, from a pydantic model, or from a short list of fields."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from ...face import SchemaError, compile_schema, errors, read_schema

_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NAME = re.compile(r"[A-Za-z_]\w*")
# What fields may be; a document need not say any of them.
_TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"}, "string": {"type": "string"}, "number": {"type": "number"},
    "integer": {"type": "integer"}, "boolean": {"type": "boolean"},
    "date": {"type": "string", "format": "date"}, "list": {"type": "array", "items": {"type": "string"}},
    "quote": {"type": "string", "x-quote": True},
}  # fmt: skip


def find_schema(schema: str | None, fields: str | None) -> str | None:
    """The text of the schema that `--schema` (a file, or `module:Class`) or `--fields` asks for; None for neither.

    Raises BadArgument, InputUnreadable, MissingExtra.
    """
    if schema is not None and fields is not None:
        raise errors.BadArgument("--schema and --fields are both given; keep one of them")
    if fields is not None:
        found = json.dumps(fields_schema(fields), separators=(",", ":"))
    elif schema is None:
        return None
    elif _MODEL.fullmatch(schema) and not Path(schema).exists():
        found = json.dumps(_model_schema(schema), separators=(",", ":"))
    else:
        return read_schema(Path(schema))
    try:
        compile_schema(json.dumps(without_own(json.loads(found))))
    except SchemaError as error:
        raise errors.BadArgument(f"{'--schema' if fields is None else '--fields'} is refused: {error}") from None
    return found


def fields_schema(fields: str) -> dict[str, Any]:
    """`title, date: date, kind: letter|invoice` as a schema of an object with these properties, null where unknown.

    Raises BadArgument.
    """
    properties: dict[str, Any] = {}
    for each in filter(None, map(str.strip, fields.split(","))):
        name, _, kind = (part.strip() for part in each.partition(":"))
        if not _NAME.fullmatch(name) or name in properties:
            raise errors.BadArgument(f"--fields: {each!a} is not a name, or a name twice; give NAME or NAME: TYPE")
        properties[name] = _type(kind or "text", each)
    if not properties:
        raise errors.BadArgument("--fields names no field; give some, such as 'title, date: date, amount: number'")
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _type(kind: str, field: str) -> dict[str, Any]:
    if "|" in kind:
        return {"enum": [choice.strip() for choice in kind.split("|")]}
    if kind not in _TYPES:
        raise errors.BadArgument(f"--fields: the type of {field!a} is not known; use {', '.join(_TYPES)}, or a|b|c")
    own = {name: value for name, value in _TYPES[kind].items() if name.startswith("x-")}
    plain = {name: value for name, value in _TYPES[kind].items() if name not in own}
    return {"anyOf": [plain, {"type": "null"}], **own}


def _model_schema(name: str) -> Any:
    module, _, model = name.partition(":")
    if "" not in sys.path:
        # As `python -m` does: a model of the user's own is in the current folder.
        sys.path.append("")
    try:
        return getattr(import_module(module), model).model_json_schema()
    except (ImportError, AttributeError) as error:
        raise errors.InputUnreadable(
            f"--schema {name}: {error}; give module:Class of a pydantic model, or a file"
        ) from None


def without_own(schema: Any) -> Any:
    """The schema without what only moedge reads: keywords that begin with `x-`."""
    if isinstance(schema, dict):
        return {name: without_own(value) for name, value in schema.items() if not name.startswith("x-")}
    return [without_own(each) for each in schema] if isinstance(schema, list) else schema


def quotes(schema: Any, answer: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every string of an answer whose schema says `"x-quote": true`."""
    if not isinstance(schema, dict):
        return
    if schema.get("x-quote") is True and isinstance(answer, str):
        yield path, answer
    if isinstance(answer, dict):
        for name, value in answer.items():
            yield from quotes(schema.get("properties", {}).get(name), value, f"{path}.{name}" if path else name)
    elif isinstance(answer, list):
        for number, value in enumerate(answer):
            yield from quotes(schema.get("items"), value, f"{path}[{number}]")


class KeyedLists:
    """The lists of an answer whose schema names a key, `"x-key": "name"`: parts of them are put together by code.

    Items with the same key are one: what an earlier one leaves open (null, or absent) a later one fills.
    """

    def __init__(self, schema: Any) -> None:
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        self._keys = {name: key for name, each in properties.items() if (key := _key_of(each)) is not None}
        # Whether an answer has nothing else, so that nothing is left to be asked about.
        self.everything = bool(properties) and self._keys.keys() == properties.keys()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def without(self, text: str) -> str:
        """An answer without these lists; as it is where it is no object."""
        found = _object(text)
        if found is None:
            return text
        return json.dumps({name: each for name, each in found.items() if name not in self._keys}, ensure_ascii=False)

    def put_together(self, text: str, parts: Sequence[str]) -> str:
        """The answer `text` with the lists of all `parts`."""
        answers = [found for each in parts if (found := _object(each)) is not None]
        lists = {name: _union((each.get(name) for each in answers), key) for name, key in self._keys.items()}
        return json.dumps((_object(text) or {}) | lists, ensure_ascii=False)


def _key_of(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return None
    choices = (schema, *(each for each in schema.get("anyOf", ()) if isinstance(each, dict)))
    return next((str(each["x-key"]) for each in choices if "x-key" in each), None)


def _union(lists: Iterable[Any], key: str) -> list[Any]:
    found: dict[str, Any] = {}
    for item in chain.from_iterable(each for each in lists if isinstance(each, list)):
        value = item.get(key) if isinstance(item, dict) else item
        name = " ".join(value.split()).casefold() if isinstance(value, str) else json.dumps(value)
        # Items without a key are one only where they are equal.
        name = json.dumps(item, sort_keys=True) if value is None else f"={name}"
        before = found.setdefault(name, item)
        if before is not item and isinstance(before, dict) and isinstance(item, dict):
            filled = {each: value for each, value in item.items() if before.get(each) is None}
            found[name] = before | filled
    return list(found.values())


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


_BLANKS = re.compile(r"\s+")


def find_quote(quote: str, text: str) -> tuple[int, int] | None:
    """Where a quote is in a text, whatever the blanks and line ends between its words; None where it is not."""
    wanted = [re.escape(word) for word in _BLANKS.split(quote.strip()) if word]
    found = re.search(r"\s+".join(wanted), text) if wanted else None
    return None if found is None else found.span()
