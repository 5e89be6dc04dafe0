"""The options of `moedge docs` and `run_documents`: those of a batch job, and what is asked about every document."""

# No annotations as texts here: the table is read at every start.
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from ...face import option, options

_TEMPLATE = "TEXT|FILE"


class QuestionOptions(TypedDict, total=False):
    """What is asked about every document, and how files are read (docs/documents.md)."""

    prompt: Annotated[
        str | Path | None,
        option.Option(
            "What to ask, a template: {{ text }}, {{ path }}, {{ page }}, {{ front_matter.title }}. Without "
            "{{ text }} the document comes behind it.",
            metavar=_TEMPLATE,
            common=True,
        ),
    ]
    system: Annotated[str | Path | None, option.Option("System message before every prompt.", metavar=_TEMPLATE)]
    task: Annotated[
        Literal["summarize", "extract", "classify", "translate", "qa"] | None,
        option.Option("Use the built-in prompt of a task; --prompt adds to it.", common=True),
    ]
    schema: Annotated[
        str | Path | None,
        option.Option("JSON schema, or pydantic model, of every answer.", metavar="FILE|MODULE:CLASS", common=True),
    ]
    fields: Annotated[
        str | None,
        option.Option(
            "Short form of a schema: 'title, date: date, kind: letter|invoice'.", metavar="LIST", common=True
        ),
    ]
    merge_prompt: Annotated[
        str | Path | None, option.Option("Template that merges the partial answers {{ text }}.", metavar=_TEMPLATE)
    ]
    long: Annotated[
        Literal["map-reduce", "split", "error"] | None,
        option.Option(
            "Documents that do not fit: merge partial answers (default), a row for each chunk, or an error row."
        ),
    ]
    each: Annotated[
        Literal["document", "chunk"],
        option.Option("One row for each document, or for each chunk.", "document", common=True),
    ]
    chunk_tokens: Annotated[
        int | None, option.Option("Most tokens of a chunk; what fits by default, up to 32768.", metavar="N", low=1)
    ]
    overlap: Annotated[int, option.Option("Tokens that a chunk repeats.", 0, metavar="N", low=0)]
    include: Annotated[list[str] | None, option.Option("Read these only (repeatable).", metavar="GLOB", common=True)]
    exclude: Annotated[list[str] | None, option.Option("Leave these out (repeatable).", metavar="GLOB")]
    reader: Annotated[str | None, option.Option("Your own reader: (bytes, name) to text.", metavar="MODULE:FUNCTION")]
    ocr: Annotated[str, option.Option("Languages of Tesseract, for scans: eng+deu.", "eng", metavar="LANGUAGES")]
    cache: Annotated[
        str | Path | None,
        option.Option(
            "Keep what was read here; in the job's folder by default.", metavar="FOLDER", takes=option.Takes.FOLDER
        ),
    ]
    mirror: Annotated[
        str | Path | None,
        option.Option(
            "Also write each answer as a Markdown file, in the tree of the documents.",
            metavar="FOLDER",
            takes=option.Takes.FOLDER,
        ),
    ]
    sample: Annotated[
        int | None,
        option.Option(
            "Answer N documents of all types and sizes, and print them.",
            flags=("--try",),
            metavar="N",
            low=1,
            common=True,
        ),
    ]
    csv_safe: Annotated[
        bool,
        option.Option(
            "In CSV, no cell is a formula of a spreadsheet: text that begins like one gets a ' in front.",
            True,
            flags=("--csv-safe/--no-csv-safe",),
            panel=option.Panel.OUTPUT,
            key=True,
        ),
    ]
    failed: Annotated[bool, option.Option("Run failed rows again.", False, panel=option.Panel.STOPPING)]
    cut: Annotated[
        bool,
        option.Option(
            "Continue answers that were cut, to the --max-tokens given now.", False, panel=option.Panel.STOPPING
        ),
    ]


class DocumentJobOptions(
    QuestionOptions,
    options.EngineOptions,
    options.StreamingOptions,
    options.AnswerLength,
    options.SamplingOptions,
    options.ClusterOptions,
    options.StoppingOptions,
    options.TableOptions,
    total=False,
):
    """The options of `moedge docs`."""


class DocumentOptions(DocumentJobOptions, options.PlanFile, total=False):
    """The options of `run_documents`: those of `moedge docs`, a saved plan, and the number of reading processes."""

    workers: Annotated[
        int | None, option.Option("Processes that read files; by default as many as there are CPUs.", low=1)
    ]
