"""The output of a job over documents: a row for each document, or for each chunk, from the answers of its rounds."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import nsmallest
from pathlib import Path
from typing import Any

from ...face import CONTINUE_CUT, ErrorCode, errors, keep_example, own_name, with_own, write_atomically
from .document import Document
from .iterate import TextCache
from .merging import Failed, Merged, Merger
from .question import Long, Question
from .rounds import Answer, Entry, RowAnswers
from .schemas import find_quote, quotes

_SHORTEST = 10
# Rows that lack a field, of which the first are kept as examples, and the share below which that is worth a look.
MOST_LACKING = 12
_SELDOM = 0.8
_TOKENS = ("prompt_tokens", "completion_tokens")


@dataclass(slots=True)
class Totals:
    """What the rows of the output come to: rows with an answer, errors by code, and how full fields are.

    `documents` have all of their rows, `pending` ones lack some; `outcomes` has each of the former once: answered, cut
    (a row of it is), failed (a row of it did), or unreadable. `cut` rows reached max_tokens, answered or not.
    `filled` has every field of a schema, `lacking` the first rows without it.
    `shortest` are (characters, id) of the shortest answers, `examples` the beginnings of some; `quotes` are those found
    in their text, and all.
    """

    documents: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    pending: int = 0
    cut: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    filled: Counter[str] = field(default_factory=Counter)
    lacking: dict[str, list[str]] = field(default_factory=dict)
    structured: int = 0
    shortest: list[tuple[int, str]] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)
    quotes_found: int = 0
    quotes: int = 0

    @property
    def num_failed(self) -> int:
        return self.failed.total()

    def add(self, row: Mapping[str, Any], names: tuple[str, ...]) -> None:
        if "error" in row:
            self.failed[row["error"]["code"]] += 1
            self.cut += row["error"]["code"] == ErrorCode.INCOMPLETE_OUTPUT
            return
        self.answered += 1
        self.finish_reasons[row["finish_reason"]] += 1
        self.cut += row["finish_reason"] == "length"
        keep_example(self.examples, row["id"], row["text"] or "")
        self.shortest = nsmallest(_SHORTEST, [*self.shortest, (len(row["text"] or ""), row["id"])])
        if isinstance(answer := row.get("answer"), dict):
            self.structured += 1
            for name in names:
                self._count_field(name, answer.get(name) not in (None, "", [], {}), row["id"])
        for each in row.get("quotes", ()):
            self.quotes += 1
            self.quotes_found += each["found"]

    def add_document(
        self, unreadable: bool, rows: Iterable[dict[str, Any]], names: tuple[str, ...]
    ) -> Iterator[dict[str, Any]]:
        """The rows of a document, which are added as they are taken, and the document behind the last."""
        cut, failed = self.cut, self.num_failed
        for row in rows:
            self.add(row, names)
            yield row
        outcome = "cut" if self.cut > cut else "failed" if self.num_failed > failed else "answered"
        self.documents += 1
        self.outcomes["unreadable" if unreadable else outcome] += 1

    @property
    def low(self) -> list[str]:
        """Fields that are filled seldom."""
        return [name for name, count in self.filled.items() if count < _SELDOM * self.structured]

    def _count_field(self, name: str, filled: bool, row_id: str) -> None:
        self.filled[name] += filled
        if not filled and len(examples := self.lacking.setdefault(name, [])) < MOST_LACKING:
            examples.append(row_id)


def may_change(code: str) -> bool:
    """Whether a row that failed with this code may be answered when it runs again."""
    return any(code == each and each.may_change for each in ErrorCode)


class DocumentTable:
    """The rows of the output in the order of the documents."""

    def __init__(
        self, question: Question, merger: Merger, answers: RowAnswers, texts: TextCache, made_by: Mapping[str, Any]
    ) -> None:
        """`made_by` are the columns that every row has: the model and its quantization."""
        self._question = question
        self._merger = merger
        self._answers = answers
        self._texts = texts
        self._schema = None if question.schema is None else json.loads(question.schema)
        self._common = {"prompt_hash": question.digest, **made_by}

    def rows(self, entry: Entry) -> Iterator[dict[str, Any]] | None:
        """Those of one document; None where it lacks an answer."""
        if entry.error is not None:
            return iter([self._failure(entry, entry.source, Failed(entry.error["code"], entry.error["message"]))])
        if self._question.long is Long.SPLIT:
            ids = entry.chunk_ids
            return self._chunks(entry, ids) if all(each in self._answers for each in ids) else None
        found = self._merger.advance(entry, self._answers)
        if isinstance(found, Failed):
            return iter([self._failure(entry, entry.source, found)])
        return iter([self._whole(entry, found)]) if isinstance(found, Merged) else None

    def _chunks(self, entry: Entry, ids: list[str]) -> Iterator[dict[str, Any]]:
        for index, each in enumerate(ids):
            answer, name = self._answers[each], f"{entry.source}#{index + 1}"
            if answer.error is not None:
                yield self._failure(entry, name, Failed(answer.error["code"], answer.error["message"]))
                continue
            pages = entry.pages(index, index)
            own = {"chunk": index + 1, "first_page": pages and pages[0], "last_page": pages and pages[1]}
            yield self._row(entry, name, answer, answer.usage, own)

    def _whole(self, entry: Entry, merged: Merged) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if len(entry.chunks) > 1:
            own = {"merges": merged.levels, "parts": [self._part(entry, *each) for each in enumerate(entry.chunk_ids)]}
        return self._row(entry, entry.source, merged.answer, merged.usage, own)

    def _part(self, entry: Entry, index: int, chunk_id: str) -> dict[str, Any]:
        """The partial answer to a chunk, with what it covers: characters of the text, and pages."""
        start, end = entry.chunks[index][:2]
        answer = self._answers[chunk_id]
        pages = entry.pages(index, index)
        return {"chunk": index + 1, "start": start, "end": end, "pages": pages and list(pages), "text": answer.shown}

    def _row(
        self, entry: Entry, name: str, answer: Answer, usage: Mapping[str, int], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"id": name, "text": answer.text}
        if answer.partial is not None:
            row["partial"] = answer.partial
        if answer.reasoning is not None:
            row["reasoning_content"] = answer.reasoning
        row |= {"finish_reason": answer.finish_reason, "usage": {each: usage.get(each, 0) for each in _TOKENS}}
        value = _parsed(answer.text) if self._schema is not None else None
        found = {} if self._schema is None else {"answer": value} | self._quotes(entry, value)
        return with_own(row, {**found, **self._columns(entry), **own})

    def _failure(self, entry: Entry, name: str, failed: Failed) -> dict[str, Any]:
        error = {"code": failed.code, "message": failed.message.replace(CONTINUE_CUT, _CONTINUE), "param": None}
        return with_own({"id": name, "error": error}, self._columns(entry))

    def _columns(self, entry: Entry) -> dict[str, Any]:
        own = {
            "source": entry.source, "sha256": entry.sha256, "type": entry.facts.get("type"),
            "pages": entry.facts.get("pages"), "chunks": len(entry.chunks),
        }  # fmt: skip
        return own | ({"notes": list(entry.notes)} if entry.notes else {}) | self._common

    def _quotes(self, entry: Entry, value: Any) -> dict[str, Any]:
        """Whether each quote of an answer is in the text of its document, and on which page."""
        asked = list(quotes(self._schema, value))
        if not asked:
            return {}
        content = self._texts.get(entry.sha256, entry.source)
        document = None if content is None else Document.of(entry.source, entry.sha256, content)
        found = []
        for path, quote in asked:
            span = None if document is None else find_quote(quote, document.text)
            pages = None if document is None or span is None else document.pages(*span)
            found.append({"field": path, "found": span is not None, "page": pages and pages[0]})
        return {"quotes": found}


_CONTINUE = "continue it with the same command and --cut --max-tokens N"


class Mirror:
    """The rows as Markdown files, in the tree of the documents: `a/b.pdf` is `a/b.pdf.md`.

    Files that are not its own are not replaced. It knows those that it wrote by a list that is written before them.
    """

    def __init__(self, folder: Path, written: Path, sources: Iterable[str] = ()) -> None:
        """`written` is the file of that list. Add rows in the order of their documents, then `finish`.

        Of `sources`, the documents that may get files, the list is written once, not again for each of them.
        """
        self._folder = folder
        self._written = written
        self._own = set(json.loads(written.read_bytes())) if written.exists() else set[str]()
        self._now = set[str]()
        self._name = ""
        self._text = ""
        self._claim({name for name in map(_file_name, sources) if not os.path.lexists(folder / name)})

    def add(self, row: Mapping[str, Any]) -> None:
        """Raises OutputExists where somebody else's file has its name. Rows that failed have no file."""
        if "error" in row:
            return
        name = _file_name(row["source"])
        if name != self._name:
            self._write()
            self._name, self._text = name, _front_matter(row)
        heading = f"\n## {row['id']}\n" if row.get("chunk") else ""
        self._text += f"{heading}\n{_markdown(row)}\n"

    def finish(self) -> None:
        """Removes the files of documents that have none any more."""
        self._write()
        for name in self._own - self._now:
            (self._folder / name).unlink(missing_ok=True)
        write_atomically(self._written, json.dumps(sorted(self._now)).encode())

    def _write(self) -> None:
        if not self._name:
            return
        path, data = self._folder / self._name, self._text.encode("utf-8", "backslashreplace")
        if path.is_file() and path.read_bytes() == data:
            self._now.add(self._name)
            return
        if os.path.lexists(path) and self._name not in self._own:
            raise errors.OutputExists(
                f"{path} exists and is not what this job wrote; move it away, or mirror elsewhere"
            )
        self._claim({self._name})
        self._now.add(self._name)
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = own_name(path)
        hidden.write_bytes(data)
        os.replace(hidden, path)

    def _claim(self, names: set[str]) -> None:
        """Lists files as this job's before they are written: after a kill they are replaced, not refused."""
        if names - self._own:
            self._own |= names
            write_atomically(self._written, json.dumps(sorted(self._own)).encode())


_MOST_NAME_NBYTES = 200


def _file_name(source: str) -> str:
    """The path with `.md`; of a part that is too long for a file system, its beginning and a hash."""
    return "/".join(map(_short, source.replace("\0", "").split("/"))) + ".md"


def _short(part: str) -> str:
    data = part.encode()
    if len(data) <= _MOST_NAME_NBYTES:
        return part
    return f"{data[: _MOST_NAME_NBYTES - 20].decode(errors='ignore')}-{blake2b(data, digest_size=6).hexdigest()}"


def _front_matter(row: Mapping[str, Any]) -> str:
    """JSON values are YAML, whatever they hold."""
    names = ("source", "sha256", "type", "pages", "chunks", "finish_reason", "model", "quant", "prompt_hash")
    lines = [f"{name}: {json.dumps(row[name], ensure_ascii=False)}" for name in names if row.get(name) is not None]
    return "\n".join(["---", *lines, "---", ""])


def _markdown(row: Mapping[str, Any]) -> str:
    """The answer as text, or a line for each of its fields."""
    answer = row.get("answer")
    if not isinstance(answer, dict):
        return str(row["text"] or "")
    shown = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in answer.items()
    }
    return "\n".join(f"- **{name}**: {' '.join(value.split())}" for name, value in shown.items())


def _parsed(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None
