"""What is asked about every document: templates, the form of the answer, and what happens to long documents.

Prompts for the usual tasks, and the one that merges partial answers, are jinja2 templates, to be printed and edited.
The instruction comes first and the document last, so that all rows begin with the same tokens, which are computed once.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any, cast

from ...face import Template, errors, text_or_file
from .document import Chunk, Document
from .schemas import find_schema, without_own

# `instruction` is the text of --prompt. What depends on a document comes behind everything that does not.
_DOCUMENT = "Document{% if pages %} (pages {{ page }} of {{ pages }}){% endif %}:\n\n{{ text }}"

TASKS = {
    "summarize": (
        "Summarize the document below for a reader who has not seen it. Write at most 150 words of plain prose. State "
        "what the document is, what it says, and the numbers, names and dates that matter. Add nothing that it does "
        "not say.{% if instruction %} {{ instruction }}{% endif %}\n\n" + _DOCUMENT
    ),
    "extract": (
        "Extract the requested fields from the document below. Copy values as they are written there; give dates as "
        "YYYY-MM-DD and numbers without units. Use null for what the document does not say: never guess."
        "{% if instruction %} {{ instruction }}{% endif %}\n\n" + _DOCUMENT
    ),
    "classify": (
        "Classify the document below. Choose the one class that fits its main content best."
        "{% if instruction %} {{ instruction }}{% endif %}\n\n" + _DOCUMENT
    ),
    "translate": (
        "Translate the document below into {{ instruction }}. Translate everything, add nothing, and keep headings, "
        "lists, tables and numbers. Write the translation only.\n\n" + _DOCUMENT
    ),
    "qa": (
        "Answer the question from the document below. Use nothing but the document, and quote the sentence that the "
        "answer is taken from. Where the document does not answer it, write: not stated.\n\n"
        "Question: {{ instruction }}\n\n" + _DOCUMENT
    ),
}
# Tasks that mean nothing without a text of --prompt, and what it has to say.
NEEDS_PROMPT = {"translate": "the language", "qa": "the question"}
# Tasks whose answers are structured.
NEEDS_SCHEMA = ("extract", "classify")

MERGE = (
    "A long document was read in parts, and each part was answered by itself. Combine the partial answers below into "
    "one answer to the request, as if the whole document had been read at once. Say everything once, keep numbers, "
    "names and page numbers, prefer what a part states over what another does not know, and add nothing.\n\n"
    "The request for each part:\n\n{{ request }}\n\nPartial answers, in the order of the document:\n\n{{ text }}"
)
# What the request of a merge has where the document was.
PART = "(the part of the document)"


class Long(StrEnum):
    """What becomes of a document that does not fit: merged partial answers, a row for each chunk, or an error."""

    MAP_REDUCE, SPLIT, ERROR = "map-reduce", "split", "error"


# What a prompt may use.
NAMES = frozenset({"text", "path", "page", "pages", "chunk", "chunks", "type", "front_matter", "instruction"})
_TEXT = "{{ text }}"


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` and `merge` are templates, `system` is a text, `schema` the text of a JSON schema.

    A chunk has at most `chunk_tokens`, None is what the model's context holds, 32,768 at most; `overlap` tokens of it
    are the end of the chunk before.
    """

    prompt: str
    instruction: str = ""
    system: str | None = None
    schema: str | None = None
    merge: str = MERGE
    long: Long = Long.MAP_REDUCE
    chunk_tokens: int | None = None
    overlap: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """What answers depend on, by the names of the options."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """16 hex digits that identify the prompts and the schema."""
        return sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def grammar(self) -> str | None:
        """The schema as the engine takes it."""
        if self.schema is None:
            return None
        return json.dumps(without_own(json.loads(self.schema)), separators=(",", ":"))


def make_question(options: Mapping[str, Any]) -> Question:
    """The question that the options of the command ask, by name. Raises BadArgument, InputUnreadable, MissingExtra."""
    task, given, merge = options.get("task"), options.get("prompt"), options.get("merge_prompt")
    text = "" if given is None else text_or_file(str(given), "--prompt")
    schema = find_schema(options.get("schema"), options.get("fields"))
    if task is None and not text.strip():
        raise errors.BadArgument("nothing is asked: give --prompt TEXT|FILE, or --task summarize")
    if task in NEEDS_PROMPT and not text.strip():
        raise errors.BadArgument(f"--task {task} needs {NEEDS_PROMPT[task]} in --prompt")
    if task in NEEDS_SCHEMA and schema is None:
        raise errors.BadArgument(f"--task {task} needs --fields or --schema: what is to be found")
    system = options.get("system")
    question = Question(
        prompt=with_document(text) if task is None else TASKS[task],
        instruction="" if task is None else text.strip(),
        system=None if system is None else text_or_file(str(system), "--system"),
        schema=schema,
        merge=MERGE if merge is None else text_or_file(str(merge), "--merge-prompt"),
        long=Long(options.get("long") or ("split" if task == "translate" else "map-reduce")),
        chunk_tokens=options.get("chunk_tokens"),
        overlap=options.get("overlap") or 0,
    )
    _check(question)
    return question


def with_document(prompt: str) -> str:
    """A prompt without `{{ text }}` gets it at the end."""
    return prompt if "text" in Template(prompt, "--prompt").fields else f"{prompt.rstrip()}\n\n{_TEXT}"


def _check(question: Question) -> None:
    if unknown := Template(question.prompt, "--prompt").fields - NAMES:
        raise errors.BadArgument(f"--prompt uses {', '.join(sorted(unknown))}; known are {', '.join(sorted(NAMES))}")
    if unknown := Template(question.merge, "--merge-prompt").fields - {"request", "text", "path", "front_matter"}:
        raise errors.BadArgument(f"--merge-prompt uses {', '.join(sorted(unknown))}; known are request, text, path")
    if question.system is not None and Template(question.system, "--system").fields:
        raise errors.BadArgument("--system uses fields; put them into --prompt: all rows share the system message")


class Prompts:
    """Prompts of one question. They raise `InvalidRow` where a template fails on a document."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._prompt = Template(question.prompt, "--prompt")
        self._merge = Template(question.merge, "--merge-prompt")

    def of_chunk(self, document: Document, chunk: Chunk, num_chunks: int) -> str:
        facts = document_facts(document)
        return self._render({**facts, "chunk": chunk.index + 1, "chunks": num_chunks}, chunk.text, chunk.pages)

    def of_merge(self, facts: Mapping[str, Any], answers: str) -> str:
        """`answers` are partial ones as text; `facts` are those of `document_facts`."""
        request = self._render({**facts, "pages": None, "chunk": 1, "chunks": 1}, PART, None)
        values = {"request": request, "text": answers, "path": facts["path"], "front_matter": facts["front_matter"]}
        return self._merge.render(values)

    def _render(self, values: Mapping[str, Any], text: str, pages: tuple[int, int] | None) -> str:
        page = "" if pages is None else pages_text(pages)
        return self._prompt.render({**values, "text": text, "page": page, "instruction": self._question.instruction})


def document_facts(document: Document) -> dict[str, Any]:
    """What prompts may use of a document beside its text."""
    front_matter = cast(dict[str, Any], document.front_matter)
    return {"path": document.source, "type": document.type, "pages": document.num_pages, "front_matter": front_matter}


def pages_text(pages: tuple[int, int]) -> str:
    """`3`, or `3-5`."""
    first, last = pages
    return str(first) if first == last else f"{first}-{last}"
