"""Inputs that are not JSON lines, as JSON lines: CSV, TSV, JSON arrays, Parquet and plain text, one row at a time.

A job reads its rows several times and at random, so another format is converted once, into the job's folder. The n-th
row becomes the n-th line. What a row means is not known here: a table's columns become the fields of a short row.
"""

import codecs
import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from io import BufferedReader
from math import isinf, isnan
from pathlib import Path
from typing import Any

from ...offload.atomic_file import AtomicFile
from ..settings.errors import InputRefused, MissingExtra
from .fields import FIELDS
from .reader import STDIN, DamagedZstd, Stream, open_input, plain
from .row import InvalidRow
from .row_formats import TEXT_COLUMN
from .workbook import MOST_INTEGER, read_sheet

# As long as a line of JSON may be.
MAX_ROW_NBYTES = 16 << 20
# Rows of Parquet that are in memory at a time.
_BATCH_ROWS = 256


class InputFormat(StrEnum):
    AUTO, JSONL, JSON, CSV, TSV, XLSX = "auto", "jsonl", "json", "csv", "tsv", "xlsx"
    PARQUET, TXT = "parquet", "txt"


_PACKED = (".gz", ".zst")
_BY_SUFFIX = {
    ".csv": InputFormat.CSV,
    ".tsv": InputFormat.TSV,
    ".tab": InputFormat.TSV,
    ".xlsx": InputFormat.XLSX,
    ".xlsm": InputFormat.XLSX,
    ".parquet": InputFormat.PARQUET,
    ".pq": InputFormat.PARQUET,
    ".txt": InputFormat.TXT,
}
_PARQUET_MAGIC = b"PAR1"
_HEAD_NBYTES = 4096


def input_format(path: str | os.PathLike[str], asked: InputFormat = InputFormat.AUTO) -> InputFormat:
    """The format as asked for, else by suffix, else JSON lines or an array by the first character.

    Raises InputRefused for content that is plainly another format than the name says. A pipe is JSON lines.
    """
    if asked is not InputFormat.AUTO:
        return asked
    if os.fspath(path) == STDIN:
        return InputFormat.JSONL
    name = Path(path).name.lower()
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return _BY_SUFFIX.get(Path(name).suffix) or _by_content(Path(path))


def _by_content(path: Path) -> InputFormat:
    """What a file holds that should hold JSON lines."""
    if path.exists() and not path.is_file():
        return InputFormat.JSONL
    with open_input(path) as raw:
        try:
            head = plain(raw).peek(_HEAD_NBYTES)[:_HEAD_NBYTES]
        except (InvalidRow, gzip.BadGzipFile, EOFError, zlib.error, DamagedZstd):
            # The check of the rows says what is wrong with it.
            return InputFormat.JSONL
    if head.startswith(_PARQUET_MAGIC):
        return InputFormat.PARQUET
    start = head.lstrip()
    if start.startswith(b"["):
        return InputFormat.JSON
    if start and not start.startswith(b"{") and (found := _other_format(start)):
        raise InputRefused(f"{path} looks like {found}, and its name says JSON lines; give --input-format {found}")
    return InputFormat.JSONL


# The first line of a table: names, and one kind of separator between them.
_HEADER = re.compile(r"[\w .\"-]+(?:([,;\t])[\w .\"-]+)(?:\1[\w .\"-]+)*")


def _other_format(head: bytes) -> str | None:
    """The format of text that is surely not JSON, by its first line; None where it may be damaged JSON."""
    header = _HEADER.fullmatch(head.decode("utf-8", "replace").splitlines()[0])
    if header is None:
        return None
    return "tsv" if header[1] == "\t" else "csv"


def convert(path: str | os.PathLike[str], kind: InputFormat, target: AtomicFile, name: str | None = None) -> str | None:
    """Writes the rows of `path` as JSON lines to `target`, which the caller publishes. Memory is that of a few rows.

    Returns the encoding of its text, None for UTF-8. Messages call the file `name`. Raises InputRefused, with the row,
    for what is not of this format; MissingExtra; InputUnreadable.
    """
    name = name or os.fspath(path)
    rows = _READERS[kind]
    encoding = _encoding(path) if kind in _PLAIN_TEXTS else None
    with open_input(path) as raw:
        try:
            plain_rows = raw if kind in _WHOLE_FILES else _unpacked(raw)
            for line in rows(plain_rows if encoding is None else _Recoded(plain_rows, encoding)):
                target.write(line)
                target.write(b"\n")
        except _Refused as error:
            raise InputRefused(f"{name}: {error}") from None
        except InvalidRow as error:
            raise InputRefused(f"{name}: {error.failure.code}: {error.failure.message}") from None
        except (gzip.BadGzipFile, zlib.error, EOFError, DamagedZstd) as error:
            raise InputRefused(f"{name}: the compressed data is damaged or cut off ({error}); copy it again") from None
        except OSError as error:
            raise InputRefused(f"{name} could not be converted to JSON lines in {target.path}: {error}") from None
    return encoding


# What programs for tables save where they do not save UTF-8: each byte is one character.
_OLD_ENCODINGS = re.compile(r"cp12\d\d|cp8\d\d|latin_1|iso8859_\d+|koi8_[rtu]|mac_\w+")
_SAMPLE_NBYTES = 256 << 10


def _encoding(path: str | os.PathLike[str]) -> str | None:
    """The encoding of a text that is not UTF-8; None where it is, and where it is no text that can be told."""
    decoder, sample = codecs.getincrementaldecoder("utf-8")(), bytearray()
    try:
        with open_input(path) as raw:
            stream = plain(raw)
            while data := stream.read(_SAMPLE_NBYTES):
                try:
                    decoder.decode(data)
                except UnicodeDecodeError:
                    sample += data + stream.read(_SAMPLE_NBYTES)
                    break
    except (InvalidRow, gzip.BadGzipFile, EOFError, zlib.error, DamagedZstd):
        # The rows say what is wrong with it.
        return None
    if not sample or 0 in sample:
        return None
    return guessed_encoding(bytes(sample), _OLD_ENCODINGS)


# Windows' own come before others that give text as good: of a few letters, statistics know little.
_WINDOWS = ("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "cp1255", "cp1256", "cp1258")
_AS_GOOD = 0.1


def guessed_encoding(sample: bytes, among: re.Pattern[str] | None = None) -> str | None:
    """What a text that is not UTF-8 is probably encoded in; None where nothing, or nothing of `among`, gives text."""
    from charset_normalizer import from_bytes

    found = from_bytes(sample)
    best = found.best()
    if best is None:
        return None
    near = {name for each in found if each.chaos <= best.chaos + _AS_GOOD for name in each.could_be_from_charset}
    name = next((each for each in _WINDOWS if each in near), best.encoding)
    return name if among is None or among.fullmatch(name) else None


class _Recoded:
    """A stream of lines in another encoding, as UTF-8."""

    def __init__(self, stream: Stream, encoding: str) -> None:
        self._stream = stream
        self._encoding = encoding

    def readline(self, most: int) -> bytes:
        line = self._stream.readline(most)
        try:
            return line.decode(self._encoding).encode()
        except UnicodeDecodeError as error:
            wrong = line[error.start]
            raise _Refused(f"byte {wrong:#04x} is neither UTF-8 nor {self._encoding}; save the file as UTF-8") from None


def _unpacked(raw: BufferedReader) -> Stream:
    if raw.peek(4)[:4] == _PARQUET_MAGIC:
        raise _Refused("this is Parquet; give --input-format parquet")
    return plain(raw)


class _Refused(Exception):
    """What is wrong with the file, and where."""


def dumped(values: dict[str, Any]) -> bytes:
    """One line. Raises ValueError for infinities."""
    return json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def _text_lines(stream: Stream) -> Iterator[str]:
    """Lines as text with their ends, each of them bounded."""
    number = 0
    while line := stream.readline(MAX_ROW_NBYTES + 1):
        number += 1
        if len(line) > MAX_ROW_NBYTES:
            raise _Refused(f"line {number} has more than {MAX_ROW_NBYTES >> 20} MiB; split the text into rows")
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Refused(
                f"line {number}: byte {error.start + 1} is not UTF-8 ({error.reason}); save the file as UTF-8"
            ) from None


def _plain_text(stream: Stream) -> Iterator[bytes]:
    """Each line is a prompt; blank ones count as lines and are no rows."""
    for line in _text_lines(stream):
        text = line.removesuffix("\n").removesuffix("\r")
        yield dumped({TEXT_COLUMN: text}) if text.strip() else b""


def _separated(separator: str) -> Callable[[Stream], Iterator[bytes]]:
    def rows(stream: Stream) -> Iterator[bytes]:
        lines = _RecordLines(stream)
        first = lines.first
        if first.startswith('{"'):
            raise _Refused("this looks like JSON lines; give --input-format jsonl")
        found = ";" if separator == "," and "," not in first and ";" in first else separator
        before = csv.field_size_limit(MAX_ROW_NBYTES)
        reader = csv.reader(lines, delimiter=found, strict=True)
        try:
            yield from _table(reader, lines)
        except csv.Error as error:
            raise _Refused(
                f"line {reader.line_num}: {error}; is a quotation mark left open, or not doubled inside of quotes?"
            ) from None
        finally:
            csv.field_size_limit(before)

    return rows


class _RecordLines:
    """The lines of a table; those of one record are bounded together, for a quotation mark left open takes them all."""

    def __init__(self, stream: Stream) -> None:
        self._lines = _text_lines(stream)
        self.first = next(self._lines, "")
        self._nchars = 0

    def __iter__(self) -> Iterator[str]:
        if self.first:
            yield self.first
        for line in self._lines:
            self._nchars += len(line)
            if self._nchars > MAX_ROW_NBYTES:
                raise csv.Error(f"one row has more than {MAX_ROW_NBYTES >> 20} MiB")
            yield line

    def end_of_record(self) -> None:
        self._nchars = 0


def _table(reader: Any, lines: _RecordLines) -> Iterator[bytes]:
    header = _header(next(reader, []))
    for cells in reader:
        lines.end_of_record()
        if not cells:
            continue
        if len(cells) != len(header):
            raise _Refused(
                f"the row that ends in line {reader.line_num} has {len(cells)} fields, the header has {len(header)}; "
                "put quotation marks around text that has separators or line ends"
            )
        line = dumped(dict(_typed(header, cells)))
        if len(line) > MAX_ROW_NBYTES:
            raise _Refused(f"the row that ends in line {reader.line_num} has more than {MAX_ROW_NBYTES >> 20} MiB")
        yield line


def _header(names: Sequence[str]) -> list[str]:
    """Column names. pandas writes its index under an empty one, which gets a name by its number."""
    header = [name.strip() or f"column_{number}" for number, name in enumerate(names, start=1)]
    if not header:
        raise _Refused("the first line is empty; wanted the names of the columns")
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise _Refused(f"two columns are called {twice[:64]!a}; rename one of them")
    return header


# Fields that hold text as it is; every other field of a row is written in a cell as in JSON.
_AS_TEXT = {"prompt", "model", "stop"}


def _typed(header: Sequence[str], cells: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Cells are text, those of a row's known fields are as in JSON, and absent where they are empty."""
    for name, cell in zip(header, cells, strict=True):
        if name == "id" or name in FIELDS or name == "metadata":
            if not cell and name != "prompt":
                continue
            yield name, cell if name == "id" or name in _AS_TEXT else _parsed(cell)
        else:
            yield name, cell


def _parsed(cell: str) -> Any:
    """The value that a cell has in JSON; its text where it is none, which the check of the field refuses."""
    try:
        value = json.loads(cell, parse_constant=str)
        dumped({"": value})
    except (ValueError, RecursionError):
        return cell
    return value


_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"[ \t\r\n]*")


class _Array:
    """The text of each element of a JSON array, read through a buffer that holds a few of them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._undecoded = b""
        self._text = ""
        self._at = 0

    def __iter__(self) -> Iterator[bytes]:
        if self._next_character() != "[":
            raise _Refused("wanted a JSON array, [{...}, ...]; for one object per line: --input-format jsonl")
        self._at += 1
        number, follows = 0, self._next_character()
        while follows != "]":
            number += 1
            yield self._element(number)
            follows = self._next_character()
            if follows not in (",", "]"):
                found = ascii(follows) if follows else "the end of the file"
                raise _Refused(f"behind element {number} of the array: wanted a comma or ], found {found}")
            self._at += follows == ","
        self._at += 1
        if self._next_character():
            raise _Refused("there is more text behind the array's end")

    def _element(self, number: int) -> bytes:
        """The decoder finds its end; what it means is for the reader of lines, which is strict."""
        self._next_character()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._more():
                    break
            except json.JSONDecodeError as error:
                if not self._more():
                    raise _Refused(f"element {number} of the array is not JSON: {error.msg}") from None
            except RecursionError:
                raise _Refused(f"element {number} of the array is nested too deep") from None
        element = self._text[self._at : end]
        self._at = end
        # Line ends are blanks here: the decoder takes none inside of a string.
        return element.replace("\r", " ").replace("\n", " ").encode()

    def _next_character(self) -> str:
        """The first that is not blank; empty at the end of the file."""
        while True:
            self._at = _BLANKS.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _more(self) -> bool:
        """Doubles the text that is not used up; False at the end of the file."""
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > MAX_ROW_NBYTES:
            raise _Refused(f"an element of the array has more than {MAX_ROW_NBYTES >> 20} MiB, or is not closed")
        data = self._stream.read(max(1 << 16, len(self._text)))
        if not data:
            return False
        data = self._undecoded + data
        try:
            text, self._undecoded = data.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            # A character may be cut at the end of what was read.
            if error.start < len(data) - 3:
                raise _Refused(f"the file is not UTF-8 ({error.reason}); save it as UTF-8") from None
            text, self._undecoded = data[: error.start].decode("utf-8"), data[error.start :]
        self._text += text
        return bool(text) or self._more()


def _parquet(raw: BufferedReader) -> Iterator[bytes]:
    """By row groups, of which a few rows at a time are Python objects."""
    parquet, arrow = import_parquet()
    try:
        file = parquet.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
        for column in file.schema_arrow:
            _refuse_binary(arrow, column.name, column.type)
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for values in batch.to_pylist():
                number += 1
                yield _json_line(values, number)
    except arrow.ArrowInvalid as error:
        raise _Refused(f"this is not a whole Parquet file ({str(error).splitlines()[0]})") from None
    except (arrow.ArrowException, ValueError) as error:
        raise _Refused(f"the Parquet file cannot be read ({str(error).splitlines()[0]})") from None


def import_parquet() -> tuple[Any, Any]:
    """pyarrow.parquet and pyarrow. Raises MissingExtra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("Parquet needs pyarrow", "parquet") from None
    return pyarrow.parquet, pyarrow


def _refuse_binary(arrow: Any, name: str, kind: Any) -> None:
    binary = (arrow.types.is_binary, arrow.types.is_large_binary, arrow.types.is_fixed_size_binary)
    if any(check(kind) for check in binary):
        raise _Refused(f"the column {name[:64]!a} holds binary data; write the file without it")
    for inner in range(kind.num_fields):
        _refuse_binary(arrow, f"{name}.{kind.field(inner).name}", kind.field(inner).type)


def _json_line(values: dict[str, Any], number: int) -> bytes:
    try:
        line = dumped({name: _jsonable(value) for name, value in values.items()})
    except (ValueError, TypeError) as error:
        raise _Refused(f"row {number} has a value that JSON cannot hold ({error})") from None
    if len(line) > MAX_ROW_NBYTES:
        raise _Refused(f"row {number} has more than {MAX_ROW_NBYTES >> 20} MiB as JSON; split its text into rows")
    return line


def _jsonable(value: Any) -> Any:
    """NaN is how data frames say null; times are written as ISO 8601."""
    if isinstance(value, float):
        if isinf(value):
            raise ValueError("an infinity")
        return None if isnan(value) else value
    if isinstance(value, dict):
        return {str(name): _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value) if isinstance(value, timedelta | Decimal) else value


def _sheet(raw: BufferedReader) -> Iterator[bytes]:
    """The first row has the names. Numbers stay numbers; empty cells are empty text, empty rows are none."""
    header: list[str] = []
    try:
        for number, cells in enumerate(read_sheet(raw), start=1):
            if all(cell is None for cell in cells):
                continue
            if not header:
                header = _header(["" if cell is None else str(cell) for cell in cells])
                continue
            yield _json_line(dict(_sheet_values(header, cells)), number)
    except ValueError as error:
        raise _Refused(str(error)) from None


def _sheet_values(header: Sequence[str], cells: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(header, cells, strict=False):
        if isinstance(cell, float) and cell.is_integer() and abs(cell) <= MOST_INTEGER:
            cell = int(cell)
        if isinstance(cell, str) or cell is None:
            yield from _typed([name], [cell or ""])
        else:
            yield name, str(cell) if name == "id" or name in _AS_TEXT else cell


_WHOLE_FILES = (InputFormat.PARQUET, InputFormat.XLSX)
_PLAIN_TEXTS = (InputFormat.CSV, InputFormat.TSV, InputFormat.TXT)
_READERS: dict[InputFormat, Callable[[Any], Iterable[bytes]]] = {
    InputFormat.JSON: _Array,
    InputFormat.CSV: _separated(","),
    InputFormat.TSV: _separated("\t"),
    InputFormat.XLSX: _sheet,
    InputFormat.PARQUET: _parquet,
    InputFormat.TXT: _plain_text,
}
