"""`moedge docs`: a folder of documents in, a table of answers out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..offload.errors import ExitCode
from .options import options
from .options.paths import new_folder, writable_file

if TYPE_CHECKING:
    from ..runtime.documents.question import Question


class Task(StrEnum):
    SUMMARIZE, EXTRACT, CLASSIFY, TRANSLATE, QA = "summarize", "extract", "classify", "translate", "qa"


class Long(StrEnum):
    MAP_REDUCE, SPLIT, ERROR = "map-reduce", "split", "error"


class Each(StrEnum):
    DOCUMENT, CHUNK = "document", "chunk"


FAILED = Annotated[
    bool, typer.Option("--failed", rich_help_panel=options.Panel.STOPPING, help="Run failed rows again.")
]
FOLDER = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder with the documents.")]
OUTPUT = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        callback=writable_file,
        help="File for the answers: .jsonl, .csv or .parquet, a row per document.",
    ),
]
PROMPT = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        metavar="TEXT|FILE",
        help="What to ask, a template: {{ text }}, {{ path }}, {{ page }}, {{ front_matter.title }}. Without "
        "{{ text }} the document comes behind it.",
    ),
]
SYSTEM = Annotated[
    str | None, typer.Option("--system", metavar="TEXT|FILE", help="System message before every prompt.")
]
TASK = Annotated[Task | None, typer.Option("--task", help="Use the built-in prompt of a task; --prompt adds to it.")]
SCHEMA = Annotated[
    str | None,
    typer.Option("--schema", metavar="FILE|MODULE:CLASS", help="JSON schema, or pydantic model, of every answer."),
]
FIELDS = Annotated[
    str | None,
    typer.Option("--fields", metavar="LIST", help="Short form of a schema: 'title, date: date, kind: letter|invoice'."),
]
MERGE_PROMPT = Annotated[
    str | None,
    typer.Option("--merge-prompt", metavar="TEXT|FILE", help="Template that merges the partial answers {{ text }}."),
]
LONG = Annotated[
    Long | None,
    typer.Option(
        "--long",
        help="Documents that do not fit: merge partial answers (default), a row for each chunk, or an error row.",
    ),
]
EACH = Annotated[Each, typer.Option("--each", help="One row for each document, or for each chunk.")]
CHUNK_TOKENS = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens", metavar="N", min=1, help="Most tokens of a chunk; what fits by default, up to 32768."
    ),
]
OVERLAP = Annotated[int, typer.Option("--overlap", metavar="N", min=0, help="Tokens that a chunk repeats.")]
INCLUDE = Annotated[list[str] | None, typer.Option("--include", metavar="GLOB", help="Read these only (repeatable).")]
EXCLUDE = Annotated[list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave these out (repeatable).")]
READER = Annotated[
    str | None, typer.Option("--reader", metavar="MODULE:FUNCTION", help="Your own reader: (bytes, name) to text.")
]
OCR = Annotated[str, typer.Option("--ocr", metavar="LANGUAGES", help="Languages of Tesseract, for scans: eng+deu.")]
CACHE = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="FOLDER",
        callback=new_folder,
        help="Keep what was read here; in the job's folder by default.",
    ),
]
MIRROR = Annotated[
    Path | None,
    typer.Option(
        "--mirror",
        metavar="FOLDER",
        callback=new_folder,
        help="Also write each answer as a Markdown file, in the tree of the documents.",
    ),
]
TRY = Annotated[
    int | None,
    typer.Option("--try", metavar="N", min=1, help="Answer N documents of all types and sizes, and print them."),
]
YES = Annotated[bool, typer.Option("--yes", "-y", help="After --try, answer the whole folder without a question.")]
PRINT_PROMPT = Annotated[
    bool, typer.Option("--print-prompt", help="Print the prompts and the schema, to edit them, and do nothing.")
]


def docs(
    model: options.MODEL,
    folder: FOLDER,
    output: OUTPUT,
    prompt: PROMPT = None,
    system: SYSTEM = None,
    task: TASK = None,
    schema: SCHEMA = None,
    fields: FIELDS = None,
    merge_prompt: MERGE_PROMPT = None,
    long: LONG = None,
    each: EACH = Each.DOCUMENT,
    chunk_tokens: CHUNK_TOKENS = None,
    overlap: OVERLAP = 0,
    include: INCLUDE = None,
    exclude: EXCLUDE = None,
    reader: READER = None,
    ocr: OCR = "eng",
    cache: CACHE = None,
    mirror: MIRROR = None,
    sample: TRY = None,
    yes: YES = False,
    print_prompt: PRINT_PROMPT = False,
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    tokens_per_pass: options.TOKENS_PER_PASS = None,
    max_sequences: options.MAX_SEQUENCES = None,
    deterministic: options.DETERMINISTIC = False,
    max_tokens: options.MAX_TOKENS = 256,
    temperature: options.TEMPERATURE = None,
    seed: options.SEED = 0,
    reasoning_effort: options.REASONING_EFFORT = None,
    max_thinking_tokens: options.MAX_THINKING_TOKENS = None,
    chat_template_kwargs: options.CHAT_TEMPLATE_KWARGS = None,
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    ray: options.RAY = None,
    ray_workers: options.RAY_WORKERS = None,
    until: options.UNTIL = None,
    max_rows: options.MAX_ROWS = None,
    max_failures: options.MAX_FAILURES = None,
    failed: FAILED = False,
    accept_drift: options.ACCEPT_DRIFT = None,
    summary: options.SUMMARY = None,
    progress: options.PROGRESS = options.Progress.AUTO,
    output_format: options.FORMAT = options.Format.HUMAN,
    verbose: options.VERBOSE = False,
    quiet: options.QUIET = False,
) -> None:
    """Ask a question about every document of a folder. Nothing leaves this machine.

    The same command resumes a job that was stopped or killed, and answers only files that are new or changed. Files
    that cannot be read, and rows that fail, go to OUTPUT's name with .errors.jsonl.
    """
    raise typer.Exit(_answer(model, folder, output, locals()))


def _answer(model: str, folder: Path, output: Path, given: Mapping[str, Any]) -> ExitCode:
    """Does what the options `given` ask for, by their names in the command."""
    output_format, quiet, sample = given["output_format"], given["quiet"], given["sample"]
    shown = output_format is options.Format.HUMAN and not quiet and not given["print_prompt"]
    options.say_device(given["gpu_mem"], shown)
    from ..runtime.api.documents import documents_request
    from ..runtime.text.confinement import lacking
    from .views.documents_view import DocumentsView

    if shown and (missing := lacking()):
        options.say(f"this kernel has no {missing}: readers of documents are bound by limits alone (moedge doctor)")
    request = documents_request(model, folder, output, given)
    if given["print_prompt"]:
        _print(request.question)
        return ExitCode.OK
    view = partial(DocumentsView, given["progress"], quiet, output_format, verbose=given["verbose"])
    code = view().run_documents(request, given["summary"])
    if sample is not None and code in _WHOLE and _wanted(given["yes"], shown):
        code = view().run_documents(replace(request, sample=None), given["summary"])
    return code


_WHOLE = (ExitCode.OK, ExitCode.SOME_ROWS_FAILED)


def _wanted(yes: bool, shown: bool) -> bool:
    """Whether the whole folder follows its sample; somebody is asked only where they can see and answer it."""
    asked = shown and sys.stdin.isatty() and sys.stderr.isatty()
    return yes or (asked and typer.confirm("Answer the whole folder now?", default=True, err=True))


def _print(question: Question) -> None:
    print(f"--- --prompt\n{question.prompt.replace('{{ instruction }}', question.instruction)}")
    if question.long.value == Long.MAP_REDUCE.value:
        print(f"--- --merge-prompt\n{question.merge}")
    if question.schema is not None:
        print(f"--- --schema\n{question.schema}")
