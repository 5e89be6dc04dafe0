"""The `response_format` of a row, in OpenAI's chat form, to the JSON schema that its answers follow.

What a schema may say is checked by `Schemas`, once for all rows that share it.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from ..sampling.grammar import ANY_OBJECT, SchemaError, compile_schema
from ..settings.errors import shown
from .failure import ErrorCode, InvalidRow
from .validators import wrong_type, wrong_value

_KINDS = ("text", "json_object", "json_schema")
# What OpenAI has beside the schema; none of it changes what may be written.
_BESIDE_SCHEMA = {"name": str, "description": str, "strict": bool}
_MAX_VERDICTS = 4096


def response_format(value: Any, param: str) -> str | None:
    """The schema as text, with its properties in the order given; None for plain text."""
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object with a type")
    kind = value.get("type")
    if kind not in _KINDS:
        raise wrong_value(kind, f"{param}.type", f"one of {', '.join(_KINDS)}")
    _only(value, ("type", "json_schema") if kind == "json_schema" else ("type",), param)
    if kind == "json_schema":
        return _schema(value.get("json_schema"), f"{param}.json_schema")
    return ANY_OBJECT if kind == "json_object" else None


def invalid_schema(error: SchemaError) -> InvalidRow:
    return InvalidRow(ErrorCode.INVALID_JSON_SCHEMA, f"the JSON schema is refused: {error}", "response_format")


class Schemas:
    """Which schemas of a file can be followed; each is compiled once, and 16 bytes of it are remembered."""

    def __init__(self) -> None:
        self._verdicts: dict[bytes, InvalidRow | None] = {}

    def check(self, schema: str) -> None:
        """Raises `InvalidRow` for a schema that is refused, and MissingExtra where no schema can be followed."""
        digest = blake2b(schema.encode(), digest_size=16).digest()
        if digest not in self._verdicts:
            if len(self._verdicts) >= _MAX_VERDICTS:
                self._verdicts.clear()
            self._verdicts[digest] = _verdict(schema)
        fault = self._verdicts[digest]
        if fault is not None:
            raise fault


def _verdict(schema: str) -> InvalidRow | None:
    try:
        compile_schema(schema)
    except SchemaError as error:
        return invalid_schema(error)
    return None


def _schema(value: Any, param: str) -> str:
    if not isinstance(value, dict):
        raise wrong_type(value, param, "an object with name and schema")
    _only(value, (*_BESIDE_SCHEMA, "schema"), param)
    for name, kind in _BESIDE_SCHEMA.items():
        if value.get(name) is not None and not isinstance(value[name], kind):
            raise wrong_type(value[name], f"{param}.{name}", "a string" if kind is str else "true or false")
    schema = value.get("schema")
    if schema is None:
        raise InvalidRow(ErrorCode.MISSING_PARAMETER, f"{param}.schema is missing", f"{param}.schema")
    if not isinstance(schema, dict):
        raise wrong_type(schema, f"{param}.schema", "an object")
    return json.dumps(schema, separators=(",", ":"))


def _only(value: dict[str, Any], known: tuple[str, ...], param: str) -> None:
    for name in value:
        if name not in known:
            message = f"{shown(name)} of {param} is not a known field; known are {', '.join(known)}"
            raise InvalidRow(ErrorCode.UNKNOWN_PARAMETER, message, f"{param}.{name[:64]}")
