"""The output files of a job: checked before it starts, and written from the journal in input order, as lines or as a
table (CSV, Parquet).

What is there is never overwritten. The same journal gives the same bytes, so an export that was cut off is simply done
again. The columns of a table are found in a first reading of all answers, its rows written in a second, one batch of
rows in memory at a time.
"""

import csv
import io
import json
import os
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b, file_digest, sha256
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ...offload.atomic_file import AtomicFile, own_name
from ..rows.answer_formats import ANSWER_KEYS
from ..rows.tables import import_parquet
from ..rows.workbook import MOST_INTEGER, import_writer, write_sheets
from ..settings.errors import OutputExists, OutputRefused
from .folder import JobFolder, now_text
from .journal.journal import Journal, read_answers
from .journal.state import HEAD_NBYTES, JobState, decode_done

TABLES = (".csv", ".parquet", ".xlsx")
_OTHERS = (".json", ".tsv", ".xls", ".feather", ".arrow", ".txt.gz", ".zst")
# What every table has, in this order; `choice` and `partial` are there where a row has them.
_BESIDE_TEXT = ("reasoning_content", "tool_calls", "probability")
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


# What takes the bytes of a file.
Sink = Callable[[bytes], object]


def is_table(out: Path) -> bool:
    return out.suffix.lower() in TABLES


def refuse_suffix(out: Path) -> None:
    """Raises OutputRefused for a name of another format, and MissingExtra for one whose package is not there."""
    suffix = out.suffix.lower()
    if suffix in _OTHERS:
        raise OutputRefused(
            f"{out}: answers are written as .jsonl, .csv, .xlsx or .parquet; choose one of these suffixes"
        )
    if suffix == ".parquet":
        import_parquet()
    if suffix == ".xlsx":
        import_writer()


def records(line: str, fields: tuple[str, ...] | None) -> Iterator[Record]:
    """The rows of the table that an answer comes to: one for each of its choices, and one for an error.

    `fields` are the properties of the job's JSON schema, which get columns of their own; None without a schema.
    """
    answer = json.loads(line)
    response = answer.get("response")
    body = answer if response is None else response["body"]
    if body.get("object") == "response":
        body = _as_chat(body)
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


def _as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body of the Responses API as that of a chat."""
    items = {item["type"]: item for item in body["output"]}
    calls = [
        {"id": item["call_id"], "type": "function", "function": {name: item[name] for name in ("name", "arguments")}}
        for item in body["output"]
        if item["type"] == "function_call"
    ]
    message = {"content": items["message"]["content"][0]["text"] if "message" in items else None}
    message |= {"reasoning_content": items["reasoning"]["content"][0]["text"]} if "reasoning" in items else {}
    reason = "tool_calls" if calls else "length" if body["incomplete_details"] else "stop"
    usage = {"prompt_tokens": body["usage"]["input_tokens"], "completion_tokens": body["usage"]["output_tokens"]}
    choice = {"message": message | ({"tool_calls": calls} if calls else {}), "finish_reason": reason}
    return {"choices": [choice], "usage": usage} | ({"metadata": body["metadata"]} if body["metadata"] else {})


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

    def __init__(self, lines: Lines, fields: tuple[str, ...] | None, first: tuple[str, ...] | None = None) -> None:
        """`first` are the columns that stand in front of those of the fields; behind them is `error` alone."""
        self._lines = lines
        self._fields = fields
        kinds: dict[str, set[type]] = {}
        longest: Counter[str] = Counter()
        for record in self.records():
            for name, value in record.items():
                # Whole numbers that Parquet cannot hold are text.
                kinds.setdefault(name, set()).add(
                    str if type(value) is int and not -(1 << 63) <= value < 1 << 63 else type(value)
                )
                longest[name] = max(longest[name], len(_cell(value)) if isinstance(value, str | list | dict) else 0)
        answered = [name for name in fields or () if name not in _FIRST]
        own = [name for name in kinds if name not in _FIRST and name not in answered]
        names = [name for name in _FIRST if name in kinds or name in _ALWAYS]
        order = (*names, *answered, *own)
        if first is not None:
            order = (*first, *(name for name in (*answered, *own) if name not in first), "error")
        self.kinds = {name: kinds.get(name, set()) - {type(None)} for name in order}
        self.longest = {name: longest[name] for name in self.kinds}

    def records(self) -> Iterator[Record]:
        for line in self._lines():
            yield from records(line, self._fields)


def write_table(
    suffix: str, lines: Lines, fields: tuple[str, ...] | None, sink: Sink, *, formulas: bool = True,
    first: tuple[str, ...] | None = None, bom: bool = False,
) -> None:  # fmt: skip
    """Writes a table in the format of `suffix`; without `formulas` no cell of a CSV is one, and with `bom` the file
    begins with a byte order mark. Raises MissingExtra.

    `first` are the columns in front of the fields (Table).
    """
    table = Table(lines, fields, first)
    if suffix.lower() == ".csv":
        sink(BOM_UTF8 if bom else b"")
        _write_csv(table, sink, _cell if formulas else _no_formula)
    elif suffix.lower() == ".xlsx":
        rows = ([_sheet_value(record.get(name)) for name in table.kinds] for record in table.records())
        write_sheets(table.longest, rows, sink)
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
            sink(_taken(buffer))
    sink(_taken(buffer))


def _taken(buffer: io.StringIO) -> bytes:
    data = buffer.getvalue().encode()
    buffer.seek(0)
    buffer.truncate()
    return data


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sheet_value(value: Any) -> Any:
    """Text, a number that a sheet holds exactly, or nothing; lists and objects are JSON."""
    exact = value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) <= MOST_INTEGER)
    return value if exact else _cell(value)


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
        self._sink(view)
        self._nbytes += len(view)
        return len(view)


# Of how many answers a report shows how many characters.
_SHORTEST, _DRAWN, _SHOWN_CHARS = 5, 5, 600


def keep_example(examples: dict[str, str], row_id: str, text: str) -> None:
    """Adds the beginning of an answer to `examples`, by the id of its row, and keeps the shortest and some others.

    The others have the smallest hashes of their ids: a uniform sample of all that were added, the same in every report.
    """
    examples[row_id] = text[:_SHOWN_CHARS]
    shortest = set(nsmallest(_SHORTEST, examples, key=lambda each: (len(examples[each]), each)))
    others = examples.keys() - shortest
    drawn = nsmallest(_DRAWN, others, key=_rank)
    for each in others.difference(drawn):
        del examples[each]


def _rank(row_id: str) -> bytes:
    return blake2b(row_id.encode()).digest()


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """`out` holds answered rows, `errors` the others; `partial` holds both when a job stops early."""

    out: Path

    @property
    def errors(self) -> Path:
        return self.out.with_suffix(".errors.jsonl")

    @property
    def partial(self) -> Path:
        return self.out.with_suffix(".partial.jsonl")

    @property
    def job(self) -> Path:
        """The job's folder: one for all outputs whose other names would be the same."""
        return self.out.with_suffix(".job")

    def refuse_existing(self) -> None:
        for path in (self.out, self.errors):
            # A dangling link counts: renaming over it would destroy it.
            if os.path.lexists(path):
                raise OutputExists(f"{path} exists and is not overwritten; move it away or choose another output name")


def claim_output(
    out: str | os.PathLike[str],
    input_path: str | os.PathLike[str],
    model_path: str | os.PathLike[str] | None = None,
) -> OutputPaths:
    """Raises `OutputRefused`, `OutputExists` if a file exists that no job wrote. Writes nothing."""
    try:
        return _claim(OutputPaths(Path(out)), input_path, model_path)
    except (OSError, ValueError) as error:
        raise OutputRefused(f"{out} cannot be an output ({error}); choose another name") from None


def _claim(
    paths: OutputPaths, input_path: str | os.PathLike[str], model_path: str | os.PathLike[str] | None
) -> OutputPaths:
    out = paths.out
    if paths.out.is_dir():
        raise OutputRefused(f"{out} is a folder; give a file name in it, such as {paths.out / 'out.jsonl'}")
    if paths.out.suffix == ".gz":
        raise OutputRefused(f"{out}: output is not compressed; drop .gz")
    refuse_suffix(out)
    if out.suffix == ".job":
        raise OutputRefused(f"{out}: .job names the folder of a job; choose another output name")
    check_folder(out.parent, model_path)
    _check_names(paths)
    for path in (paths.out, paths.errors, paths.partial):
        if path.exists() and Path(input_path).exists() and path.samefile(input_path):
            raise OutputRefused(f"{path} is the input, which would be overwritten; choose another output name")
    if not (paths.job / "journal").is_file():
        paths.refuse_existing()
    return paths


def _check_names(paths: OutputPaths) -> None:
    """Checks all names now: a name that is too long must not fail at the end of the job."""
    if "\0" in paths.out.name:
        raise OutputRefused(f"{paths.out.name!a} cannot be an output: it contains a NUL; choose another name")
    limit = os.pathconf(paths.out.parent, "PC_NAME_MAX")
    for path in (paths.out, paths.errors, paths.partial):
        if len(os.fsencode(path.name)) > limit:
            raise OutputRefused(f"{path.name} has more than {limit} bytes; choose a shorter output name")


def check_folder(folder: Path, model_path: str | os.PathLike[str] | None = None) -> None:
    """Raises OutputRefused where no output can be written."""
    if not folder.is_dir():
        raise OutputRefused(f"the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputRefused(f"the folder {folder} is not writable; choose another output name")
    if model_path is not None and folder.resolve().is_relative_to(Path(model_path).resolve()):
        raise OutputRefused(f"the folder {folder} belongs to the model; write the output elsewhere")


def export(journal: Journal, folder: JobFolder, paths: OutputPaths) -> None:
    """Publishes OUT, and the error file if a row failed. Raises OutputExists where something else has their names."""
    with (
        _HashedFile(paths.out, folder.unfinished("out")) as answered,
        _HashedFile(paths.errors, folder.unfinished("errors")) as failed,
    ):
        table = is_table(paths.out)
        for done in read_answers(folder.journal, journal.state):
            if done.failed:
                failed.write_line(done.line)
            elif not table:
                answered.write_line(done.line)
        if table:
            _write_table(paths.out, folder.journal, journal.state, answered.write)
        exported = {"out": answered.sha256, "errors": failed.sha256 if failed.nbytes else None}
        _refuse_foreign(paths, exported, _hashes(journal.state))
        if failed.nbytes:
            failed.publish()
        else:
            paths.errors.unlink(missing_ok=True)
        # OUT last: whoever sees it can rely on the errors being there too.
        answered.publish()
        paths.partial.unlink(missing_ok=True)
    journal.exported(**exported, at=now_text())


def _write_table(out: Path, journal: Path, state: JobState, sink: Sink) -> None:
    request = state.opened["request"]
    fields, formulas = schema_fields(request["defaults"].get("schema")), not request.get("csv_safe", False)

    def lines() -> Iterator[str]:
        return (done.line for done in read_answers(journal, state))

    write_table(out.suffix, lines, fields, sink, formulas=formulas, bom=request.get("csv_bom", False))


def export_partial(journal: Path, state: JobState, target: Path) -> None:
    """Every row that is finished, answered or failed, in one file, which is a table where its name says so."""
    with AtomicFile(target, own_name(target)) as file:
        if is_table(target):
            _write_table(target, journal, state, file.write)
        else:
            for done in read_answers(journal, state):
                file.write(done.line.encode("ascii") + b"\n")
        file.publish()


class AnswerStream:
    """Copies answers from a journal to `out`, from byte `begin` on."""

    def __init__(self, out: BinaryIO, begin: int = 0) -> None:
        self._out = out
        self._end = begin
        self.closed = False

    def upto(self, journal: Path, end: int | None = None) -> None:
        """Writes what was answered up to byte `end`, or all; `closed` says whether nobody reads any more."""
        if self.closed or (end is not None and end <= self._end):
            return
        with journal.open("rb") as file:
            file.seek(self._end)
            try:
                while (end is None or self._end < end) and (line := file.readline()).endswith(b"\n"):
                    self._end += len(line)
                    if (done := decode_done(line[HEAD_NBYTES:-1])) is not None:
                        self._out.write(done.line.encode("ascii") + b"\n")
                self._out.flush()
            except BrokenPipeError:
                self.closed = True
                # Or the interpreter would fail at its end, when it flushes.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())

    def close(self) -> None:
        self._out.close()


def partial_file(journal: Journal, folder: JobFolder, paths: OutputPaths) -> AnswerStream:
    """The partial file of a running job, for answers as soon as they are on disk.

    It begins with every answer so far, in input order. A row that is continued has a second line, which counts.
    """
    journal.sync()
    export_partial(folder.journal, journal.state, paths.partial)
    return AnswerStream(paths.partial.open("ab"), journal.committed.end)


def is_exported(state: JobState, paths: OutputPaths) -> bool:
    """Whether the output files are unchanged since the job wrote them."""
    if not (state.finished and state.export_is_current):
        return False
    return {"out": file_sha256(paths.out), "errors": file_sha256(paths.errors)} == _hashes(state)


def refuse_foreign_outputs(state: JobState, paths: OutputPaths) -> None:
    """Raises OutputExists for an output that is not what the job wrote last."""
    _refuse_foreign(paths, _hashes(state))


def _hashes(state: JobState) -> dict[str, str | None]:
    """sha256 (hex) of what was written last, by file; None where nothing was."""
    return {name: (state.exported or {}).get(name) for name in ("out", "errors")}


def _refuse_foreign(paths: OutputPaths, *own: Mapping[str, str | None]) -> None:
    for name, path in (("out", paths.out), ("errors", paths.errors)):
        # A dangling link counts: renaming over it would destroy it.
        if os.path.lexists(path) and file_sha256(path) not in {each[name] for each in own} - {None}:
            raise OutputExists(
                f"{path} exists and is not what this job wrote; move it away, then start the same command again. "
                "No answer is lost"
            )


def file_sha256(path: Path) -> str | None:
    """Of a file's bytes, in hex; None where there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file_digest(file, sha256).hexdigest()


class _HashedFile(AtomicFile):
    def __init__(self, path: Path, hidden: Path) -> None:
        super().__init__(path, hidden)
        self.nbytes = 0
        self._digest = sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write_line(self, line: str) -> None:
        self.write(line.encode("ascii") + b"\n")

    def write(self, data: bytes) -> None:
        self.nbytes += len(data)
        self._digest.update(data)
        super().write(data)
