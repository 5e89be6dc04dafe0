"""A job over documents on disk: the folder is read and split into rows, answers are merged, and the output is written.

Everything but the answers themselves is computed again from the folder, so a job may be killed at any moment. Who
answers rows is not known here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Self

from ...face import (
    AtomicFile,
    InvalidRow,
    OutputPaths,
    errors,
    file_sha256,
    is_table,
    schema_fields,
    write_atomically,
    write_table,
)
from .document import Chunk, Document, UnreadDocument, split
from .expected import AskedRow, Expected
from .iterate import FoundFile, FoundFiles, Skipped, TextCache, find_files, folder_of, read_as_completed
from .merging import Merger, Missing, PromptTokens
from .question import Long, Prompts, document_facts
from .readers.read import refuse_missing_readers
from .request import DocumentPaths, DocumentsRequest, refuse_foreign
from .rounds import Entry, EntryLog, IndexedEntries, Round, Rounds, RowAnswers, read_entries
from .schemas import KeyedLists
from .table import DocumentTable, Mirror, Totals
from .unpacking import Unpacked

if TYPE_CHECKING:
    # It knows plans, which what is refused at once needs not.
    from ...face import RunSummary

MAX_CHUNK_TOKENS = 32_768
# Tokens that may appear where a text meets the prompt around it.
_SEAM_TOKENS = 8


@dataclass(slots=True)
class FolderReport:
    """The files of a folder: those that are documents by suffix, the others by reason, and what is new since before."""

    num_files: int = 0
    nbytes: int = 0
    suffixes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[Skipped] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    new: int = 0
    changed: int = 0
    removed: int = 0
    split: int = 0

    def found(self, files: Iterable[FoundFile]) -> FoundFiles:
        """Counts files; returns those that are to be read."""
        taken = FoundFiles()
        for each in files:
            if each.skipped is not None:
                self.skipped[each.skipped] += 1
                continue
            self.num_files += 1
            self.nbytes += each.nbytes
            self.suffixes[Path(each.path).suffix.lower() or "no suffix"] += 1
            taken.append(each)
        return taken


@dataclass(frozen=True, slots=True)
class WholeFolder:
    """An estimate for all files of a folder: rows that ask about chunks, tokens of prompts and answers, and seconds at
    the rate of a sample, which more rows at a time exceed."""

    rows: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """The counts of one tokenizer: of a text, and of a prompt as it will be asked; a prompt may have `limit`."""

    text: Callable[[str], int]
    prompt: PromptTokens
    limit: int


@dataclass(frozen=True, slots=True)
class Listed:
    """The files of a folder that are documents, in their order, and the counts of all of them."""

    files: FoundFiles
    report: FolderReport

    @classmethod
    def of(cls, request: DocumentsRequest, paths: DocumentPaths) -> Self:
        """Lists the folder of a job, or takes its one file, and unpacks what lies in files.

        Raises InputUnreadable, MissingExtra, InputRefused where nothing is to be read.
        """
        documents, report = request.batch.input, FolderReport()
        folder = folder_of(documents)
        with closing(Unpacked(folder, paths.members, request.reading)) as unpacked:
            found = find_files(documents, include=request.include, exclude=request.exclude, unpacked=unpacked)
            files = report.found(each for each in found if not _is_own(paths.outputs, folder, each))
        if not report.num_files:
            raise errors.InputRefused(f"{documents} has no file to read; {report.skipped.total():,} were skipped")
        if request.reading.reader is None:
            refuse_missing_readers(report.suffixes)
        return cls(files, report)


def _is_own(outputs: OutputPaths, folder: Path, found: FoundFile) -> bool:
    """Whether a file is one of the job: its output may be in the folder of the documents."""
    path = Path(found.path)
    ours = (each for each in (outputs.out, outputs.errors, outputs.partial, outputs.job) if each.name == path.name)
    return any((folder / path).parent.resolve() == each.parent.resolve() for each in ours)


class DocumentJob:
    """The job in one folder, which the caller has locked."""

    def __init__(self, request: DocumentsRequest, paths: DocumentPaths, tokens: TokenCounter, listed: Listed) -> None:
        self._request = request
        self._paths = paths
        self._tokens = tokens
        self._question = request.question
        self._prompts = Prompts(request.question)
        schema = None if request.question.schema is None else json.loads(request.question.schema)
        self._merger = Merger(self._prompts, tokens.prompt, tokens.limit, KeyedLists(schema))
        self.rounds = Rounds(paths.rounds)
        self.report = listed.report
        self.totals = Totals()
        self._files = listed.files
        self._expected: Expected | None = None

    @property
    def index(self) -> Path:
        """The documents of the folder, or of the sample, when all were read."""
        return self._paths.index if self._request.sample is None else self._paths.sample

    @property
    def files(self) -> Sequence[FoundFile]:
        """The files to read, in their order."""
        return self._files if self._request.sample is None else spread(self._files, self._request.sample)

    def whole(self, ran: Sequence[RunSummary]) -> WholeFolder | None:
        """What all files come to, by those of a sample and the runs that answered it; None where nothing ran."""
        seconds = sum(each.seconds.generate or 0.0 for each in ran)
        rows, prompt = sum(each.rows.total for each in ran), sum(each.tokens.prompt for each in ran)
        generated = sum(each.tokens.generated for each in ran)
        if self._expected is None or not seconds or not rows or not prompt + generated:
            return None
        expected = self._expected.among(self._files)
        tokens = expected.tokens + expected.rows * generated / rows
        return WholeFolder(round(expected.rows), round(tokens), seconds * tokens / (prompt + generated))

    def read(self, progress: Callable[[int, int], None]) -> list[Round]:
        """Reads and splits every file; then gives the rounds to be answered: those that an earlier run left, and the
        rows that are in none.

        A reading that ends early is begun again by the next run, with what it read in the cache of texts.
        """
        files, before = self.files, IndexedEntries(self.index)
        log = EntryLog(self._paths.outputs.job, len(files))
        try:
            self.rounds.add(self._unasked(files, log, progress))
            with AtomicFile(self.index) as index:
                for line in log.lines():
                    index.write(line)
                index.publish()
            self._count(before)
        finally:
            log.close()
            before.close()
        return [each for each in self.rounds.all if not each.finished]

    def _unasked(
        self, files: Sequence[FoundFile], log: EntryLog, progress: Callable[[int, int], None]
    ) -> Iterator[dict[str, Any]]:
        """The rows of all files that have no answer and are in no round."""
        asked = RowAnswers(path for each in self.rounds.all for path in (each.files if each.finished else [each.rows]))
        self._expected = Expected.of(files)
        for done, (number, found) in enumerate(self._read(files), 1):
            entry, rows = self._split(found)
            log.add(number, entry)
            self._expected.add(files[number], rows)
            progress(done, len(files))
            yield from ({"id": each.row_id, "prompt": each.prompt} for each in rows if each.row_id not in asked)

    def _count(self, before: IndexedEntries) -> None:
        """Counts what is new since the index before."""
        report, known = self.report, 0
        for entry in read_entries(self.index):
            digest = before.sha256(entry.source)
            known += digest is not None
            report.new += digest is None
            report.changed += digest is not None and digest != entry.sha256
            report.split += len(entry.chunks) > 1
            if entry.error is not None:
                report.unread[entry.error["code"]] += 1
        report.removed = len(before) - known

    def merge(self) -> Round | None:
        """The round of merges that the answers so far allow; None where every document has its answer."""
        if self._question.long is not Long.MAP_REDUCE:
            return None
        answers = self.rounds.answers()
        return self.rounds.add(self._merges(answers))

    def in_use(self, row_ids: Mapping[str, int]) -> frozenset[int]:
        """Those of these rows whose answers the output is made of today: no merge of answers that grew is, and no
        part of a document that was removed or is split elsewhere."""
        answers = self.rounds.answers(row_ids)
        for entry in read_entries(self.index):
            # A document that lacks an answer is not looked at further.
            answers.wanted.update(each for each in entry.chunk_ids if each in row_ids)
            if entry.error is None and self._question.long is Long.MAP_REDUCE:
                self._merger.advance(entry, answers)
        return frozenset(row_ids[each] for each in answers.wanted)

    def publish(self, made_by: Mapping[str, Any]) -> None:
        """Writes OUT and the errors beside it. Raises OutputExists where something else has their names."""
        outputs = self._paths.outputs
        with (
            AtomicFile(outputs.out, self._paths.folder.unfinished("out")) as out,
            AtomicFile(outputs.errors, self._paths.folder.unfinished("errors")) as errors,
        ):
            failed = self._write(made_by, out, errors, is_table(outputs.out), mirror := self._mirror())
            hashes = {"out": file_sha256(outputs.out), "errors": file_sha256(outputs.errors)}
            refuse_foreign(self._paths, hashes)
            out.flush()
            errors.flush()
            now = {"out": file_sha256(out.hidden), "errors": file_sha256(errors.hidden)}
            # Before the files themselves: after a kill between the two, either is what this job wrote.
            known = {name: sorted({each for each in (hashes[name], now[name]) if each}) for name in now}
            write_atomically(self._paths.published, json.dumps(known).encode())
            if failed:
                errors.publish()
            else:
                outputs.errors.unlink(missing_ok=True)
            out.publish()
            if mirror is not None:
                mirror.finish()
            outputs.partial.unlink(missing_ok=True)

    def publish_partial(self, made_by: Mapping[str, Any]) -> None:
        """Writes what is finished under the partial name, always as JSON lines."""
        with AtomicFile(self._paths.outputs.partial) as partial:
            self._write(made_by, partial, partial, table=False)
            partial.publish()

    def finished_rows(self, made_by: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows of the output that are finished, in their order; counts them in `totals`."""
        self.totals = Totals()
        texts = TextCache(self._request.cache or self._paths.texts, self._request.reading)
        table = DocumentTable(self._question, self._merger, self.rounds.answers(), texts, made_by)
        names = schema_fields(self._question.schema) or ()
        for entry in read_entries(self.index):
            rows = table.rows(entry)
            if rows is None:
                self.totals.pending += 1
                continue
            yield from self.totals.add_document(entry.error is not None, rows, names)

    def _mirror(self) -> Mirror | None:
        if self._request.mirror is None:
            return None
        sources = (each.source for each in read_entries(self.index) if each.error is None)
        return Mirror(self._request.mirror, self._paths.mirrored, sources)

    def _read(self, files: Sequence[FoundFile]) -> Iterator[tuple[int, Document | UnreadDocument]]:
        request, folder = self._request, folder_of(self._request.batch.input)
        cache = request.cache or self._paths.texts
        members = self._paths.members
        return read_as_completed(folder, members, enumerate(files), request.reading, cache, request.workers, Event())

    def _split(self, found: Document | UnreadDocument) -> tuple[Entry, list[AskedRow]]:
        """The entry of a document, and the rows that ask about its chunks."""
        if isinstance(found, UnreadDocument):
            return Entry(found.source, found.sha256, error={"code": found.code, "message": found.message}), []
        try:
            chunks = list(self._chunks(found))
            prompts = [self._prompts.of_chunk(found, chunk, len(chunks)) for chunk in chunks]
        except InvalidRow as error:
            return self._refused(found, str(error.failure.code), error.failure.message), []
        except ValueError as error:
            return self._refused(found, "context_length_exceeded", str(error)), []
        if self._question.long is Long.ERROR and len(chunks) > 1:
            return self._refused(
                found,
                "document_too_long",
                f"it takes {len(chunks)} chunks; use --long map-reduce or split, or raise --chunk-tokens",
            ), []
        spans = tuple((each.start, each.end, *(each.pages or (0, 0))) for each in chunks)
        entry = Entry(found.source, found.sha256, document_facts(found), spans, found.notes)
        tokens = self._tokens.prompt
        rows = [AskedRow(name, each, tokens(each)) for name, each in zip(entry.chunk_ids, prompts, strict=True)]
        return entry, rows

    def _refused(self, found: Document, code: str, message: str) -> Entry:
        facts = document_facts(found)
        return Entry(found.source, found.sha256, facts, error={"code": code, "message": message})

    def _chunks(self, document: Document) -> Iterator[Chunk]:
        """Raises ValueError where the prompt leaves no tokens for the text."""
        question = self._question
        empty = Chunk(9999, 0, 0, "", (9999, 9999) if document.page_starts else None)
        around = self._tokens.prompt(self._prompts.of_chunk(document, empty, 9999)) + _SEAM_TOKENS
        fits = self._tokens.limit - around
        if fits < 1:
            raise ValueError(
                f"the prompt without the document has {around} tokens, and the context leaves {self._tokens.limit} "
                "beside the answer; shorten the prompt, or lower --max-tokens"
            )
        limit = min(fits, question.chunk_tokens or MAX_CHUNK_TOKENS)
        overlap = min(question.overlap, (limit - 1) // 2)
        return split(document.text, limit, self._tokens.text, overlap=overlap, page_starts=document.page_starts)

    def _merges(self, answers: RowAnswers) -> Iterator[dict[str, Any]]:
        for entry in read_entries(self.index):
            if entry.error is None and len(entry.chunks) > 1:
                found = self._merger.advance(entry, answers)
                if isinstance(found, Missing):
                    yield from ({"id": each, "prompt": prompt} for each, prompt in found.prompts)

    def _write(
        self, made_by: Mapping[str, Any], out: AtomicFile, errors: AtomicFile, table: bool, mirror: Mirror | None = None
    ) -> bool:
        """Whether there are errors; a table has them, too."""
        failed = False
        lines = AtomicFile(self._paths.outputs.job / "table.jsonl") if table else out
        try:
            for row in self.finished_rows(made_by):
                line = _line(row)
                if mirror is not None:
                    mirror.add(row)
                if "error" in row:
                    failed = True
                    errors.write(line)
                elif not table:
                    out.write(line)
                if table:
                    lines.write(_line({name: value for name, value in row.items() if name in _OF_TABLE}))
            if table:
                lines.flush()
                fields = schema_fields(self._question.schema)
                parts = ("chunk", "first_page", "last_page") if self._question.long is Long.SPLIT else ()
                write_table(
                    self._paths.outputs.out.suffix, lambda: _lines(lines.hidden), fields, out.write,
                    formulas=not self._request.batch.csv_safe, bom=self._request.batch.csv_bom,
                    first=("source", *parts, *(() if fields else ("text",))),
                )  # fmt: skip
        finally:
            if table:
                lines.discard()
        return failed


# What a table shows, and what its answers are read from. Where an answer comes from is in lines of JSON.
_OF_TABLE = {
    "id", "text", "finish_reason", "usage", "error", "source", "chunk", "first_page", "last_page",
}  # fmt: skip


def spread(files: Sequence[FoundFile], count: int) -> list[FoundFile]:
    """`count` files of all suffixes and sizes, in the order of `files`."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for number, each in enumerate(files):
        groups.setdefault(Path(each.path).suffix.lower(), []).append((each.nbytes, number))
    ranked: list[tuple[int, int, str, int]] = []
    for suffix, group in groups.items():
        group.sort()
        # The middle size first, then the quarters, and so on; of types that do not all get in, the most frequent ones.
        order = nsmallest(count, range(len(group)), key=lambda position: (_turn(position, len(group)), position))
        ranked += [(rank, -len(group), suffix, group[position][1]) for rank, position in enumerate(order)]
    return [files[number] for number in sorted(number for *_, number in nsmallest(count, ranked))]


def _turn(position: int, size: int) -> int:
    """In which round of a bisection the middle of `size` items comes to `position`."""
    first, last, turn = 0, size, 0
    while True:
        middle = (first + last) // 2
        if middle == position:
            return turn
        first, last, turn = (middle + 1, last, turn + 1) if position > middle else (first, middle, turn + 1)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="ascii") as file:
        yield from file
