"""`moedge docs`: a folder of documents in, a table of answers out."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from ...cli.face import MODEL, ViewOptions, command, say, say_device
from ...face import ExitCode, option
from .options import DocumentJobOptions

if TYPE_CHECKING:
    from .question import Question


FOLDER = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder with the documents, or one document.")]


class DocsCommand(DocumentJobOptions, ViewOptions, total=False):
    """The options of `moedge docs`."""

    output: Annotated[
        Path,
        option.Option(
            "File for the answers: .jsonl, .csv or .parquet, a row per document.",
            ...,
            flags=("--output", "-o"),
            takes=option.Takes.OUTPUT,
            common=True,
        ),
    ]
    yes: Annotated[
        bool, option.Option("After --try, answer the whole folder without a question.", False, flags=("--yes", "-y"))
    ]
    print_prompt: Annotated[
        bool, option.Option("Print the prompts and the schema, to edit them, and do nothing.", False)
    ]


@command(DocsCommand)
def docs(model: MODEL, folder: FOLDER, **given: Unpack[DocsCommand]) -> None:
    """Ask a question about every document of a folder. Nothing leaves this machine.

    The same command resumes a job that was stopped or killed, and answers only files that are new or changed. Files
    that cannot be read, and rows that fail, go to OUTPUT's name with .errors.jsonl.
    """
    raise typer.Exit(_answer(model, folder, given))


def _answer(model: str, folder: Path, given: DocsCommand) -> ExitCode:
    sample = given["sample"]
    shown = given["output_format"] == "human" and not given["quiet"] and not given["print_prompt"]
    say_device(given["gpu_mem"], shown)
    from ...face import lacking
    from .run import documents_request
    from .view import DocumentsView

    if shown and (missing := lacking()):
        say(f"this kernel has no {missing}: readers of documents are bound by limits alone (moedge doctor)")
    request = documents_request(model, folder, given["output"], given)
    if given["print_prompt"]:
        _print(request.question)
        return ExitCode.OK
    view = partial(DocumentsView, given["progress"], given["quiet"], given["output_format"], verbose=given["verbose"])
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
    if question.long.value == "map-reduce":
        print(f"--- --merge-prompt\n{question.merge}")
    if question.schema is not None:
        print(f"--- --schema\n{question.schema}")
