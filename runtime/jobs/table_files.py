"""Answers as a table: CSV and Parquet, a row for every row of the input, in its order.

A table is a function of the journal: its columns are found in a first reading of all answers, its rows written in a
second. One batch of rows is in memory at a time.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ..rows.answer_formats import ANSWER_KEYS
from ..rows.tables import import_parquet
from ..settings.errors import OutputRefused

TABLES = (".csv", ".parquet")
_OTHERS = (".json", ".tsv", ".xlsx", ".xls", ".feather", ".arrow", ".txt.gz", ".zst")
# What every table has, in this order; `choice` and `partial` are there where a row has them.
_BESIDE_TEXT = ("reasoning_content", "tool_calls")
_FIRST = (
    "id",
    "choice",
    "text",
    "partial",
    *_BESIDE_TEXT,
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "error",
)
_ALWAYS = ("id", "text", "finish_reason", "prompt_tokens", "completion_tokens", "error")
_ANSWER_PREFIX = "answer_"
_BATCH_ROWS = 1024

# All answers of a job as lines of JSON, in order; called once for each reading.
Lines = Callable[[], Iterable[str]]
Record = dict[str, Any]


class Sink(Protocol):
    def write(self, data: bytes) -> object: ...


def is_table(out: Path) -> bool:
    return out.suffix.lower() in TABLES


def refuse_suffix(out: Path) -> None:
    """Raises OutputRefused for a name of another format, and MissingExtra for one whose package is not there."""
    suffix = out.suffix.lower()
    if suffix in _OTHERS:
        raise OutputRefused(f"{out}: answers are written as .jsonl, .csv or .parquet; choose one of these suffixes")
    if suffix == ".parquet":
        import_parquet()


def records(line: str, fields: tuple[str, ...] | None) -> Iterator[Record]:
    """The rows of the table that an answer comes to: one for each of its choices, and one for an error.

    `fields` are the properties of the job's JSON schema, which get columns of their own; None without a schema.
    """
    answer = json.loads(line)
    response = answer.get("response")
    body = answer if response is None else response["body"]
    own = {name: value for name, value in answer.items() if name not in ANSWER_KEYS}
    if "metadata" in body:
        own["metadata"] = body["metadata"]
    common = {"id": answer["id"] if response is None else answer["custom_id"]}
    if (error := body.get("error")) is not None:
        partial = {"partial": error["partial"]} if "partial" in error else {}
        yield {**common, **partial, "error": f"{error['code']}: {error['message']}", **own}
        return
    choices, usage = body.get("choices") or [body], body["usage"]
    common |= {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    for number, choice in enumerate(choices):
        numbered = {"choice": number} if len(choices) > 1 else {}
        yield {**common, **numbered, **_choice(choice, fields, own), **own}


def _choice(choice: Mapping[str, Any], fields: tuple[str, ...] | None, own: Mapping[str, Any]) -> Record:
    message = choice.get("message")
    text = choice.get("text") if message is None else message["content"]
    found: Record = {"text": text, "finish_reason": choice["finish_reason"]}
    said = choice if message is None else message
    found |= {name: said[name] for name in _BESIDE_TEXT if said.get(name) is not None}
    if fields is None or text is None:
        return found
    try:
        value = json.loads(text)
    except ValueError:
        # The row had a response_format of its own.
        return found
    return found | ({_column(name, own): each for name, each in value.items()} if isinstance(value, dict) else {})


def _column(name: str, own: Mapping[str, Any]) -> str:
    """The column of a field of a JSON answer, beside those that are taken."""
    while name in _FIRST or name in own:
        name = _ANSWER_PREFIX + name
    return name


def schema_fields(schema: str | None) -> tuple[str, ...] | None:
    """The properties of a job's schema, in its order; None without a schema."""
    if schema is None:
        return None
    properties = json.loads(schema).get("properties")
    return tuple(properties) if isinstance(properties, dict) else ()


class Table:
    """The columns of all answers, and what each holds."""

    def __init__(self, lines: Lines, fields: tuple[str, ...] | None) -> None:
        self._lines = lines
        self._fields = fields
        kinds: dict[str, set[type]] = {}
        for record in self.records():
            for name, value in record.items():
                # Whole numbers that Parquet cannot hold are text.
                kinds.setdefault(name, set()).add(
                    str if type(value) is int and not -(1 << 63) <= value < 1 << 63 else type(value)
                )
        answered = [name for name in fields or () if name not in _FIRST]
        own = [name for name in kinds if name not in _FIRST and name not in answered]
        names = [name for name in _FIRST if name in kinds or name in _ALWAYS]
        self.kinds = {name: kinds.get(name, set()) - {type(None)} for name in (*names, *answered, *own)}

    def records(self) -> Iterator[Record]:
        for line in self._lines():
            yield from records(line, self._fields)


def write_table(
    suffix: str, lines: Lines, fields: tuple[str, ...] | None, sink: Sink, *, formulas: bool = True
) -> None:
    """Writes a table in the format of `suffix`; without `formulas` no cell of a CSV is one. Raises MissingExtra."""
    table = Table(lines, fields)
    if suffix.lower() == ".csv":
        _write_csv(table, sink, _cell if formulas else _no_formula)
    else:
        _write_parquet(table, sink)


def _write_csv(table: Table, sink: Sink, cell: Callable[[Any], str]) -> None:
    """UTF-8; null is empty, text is in quotation marks where it needs them, and lists and objects are JSON."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(cell, table.kinds))
    for record in table.records():
        writer.writerow([cell(record.get(name)) for name in table.kinds])
        if buffer.tell() > 1 << 16:
            sink.write(_taken(buffer))
    sink.write(_taken(buffer))


def _taken(buffer: io.StringIO) -> bytes:
    data = buffer.getvalue().encode()
    buffer.seek(0)
    buffer.truncate()
    return data


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# How formulas begin in spreadsheets, in East Asian ones too; OWASP's "CSV injection".
_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def _no_formula(value: Any) -> str:
    """The cell as text for a spreadsheet where it would be a formula; numbers stay."""
    cell = _cell(value)
    if not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def _write_parquet(table: Table, sink: Sink) -> None:
    parquet, arrow = import_parquet()
    types = {str: arrow.string(), bool: arrow.bool_(), int: arrow.int64(), float: arrow.float64()}
    schema = arrow.schema([(name, types[_column_type(kinds)]) for name, kinds in table.kinds.items()])
    rows = table.records()
    with parquet.ParquetWriter(_File(sink), schema, compression="zstd") as writer:
        while batch := list(islice(rows, _BATCH_ROWS)):
            columns = [[_value(row.get(name), table.kinds[name]) for row in batch] for name in table.kinds]
            arrays = [arrow.array(column, each.type) for column, each in zip(columns, schema, strict=True)]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))


def _column_type(kinds: set[type]) -> type:
    """A column of values of several kinds, or of lists and objects, holds text."""
    if kinds == {int, float}:
        return float
    return next(iter(kinds)) if len(kinds) == 1 and kinds <= {str, bool, int, float} else str


def _value(value: Any, kinds: set[type]) -> Any:
    if value is None or _column_type(kinds) is not str:
        return value
    return _cell(value)


class _File(io.RawIOBase):
    """What pyarrow writes to, at the end only."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._nbytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._nbytes

    def write(self, data: Any) -> int:
        view = bytes(data)
        self._sink.write(view)
        self._nbytes += len(view)
        return len(view)
