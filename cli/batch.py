"""`moedge batch`: a file of prompts in, a file of answers out; `moedge demo` does so with bundled ones."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack, cast

import typer

from ..offload.errors import ExitCode
from ..runtime.settings.option import Option, Panel, Takes
from ..runtime.settings.options import BatchOptions, EnergyOptions
from .options import options
from .options.options import ViewOptions

if TYPE_CHECKING:
    from ..runtime.jobs.outputs import AnswerStream
    from ..runtime.jobs.request import BatchRequest
    from .views.job_view import JobView

INPUT = Annotated[
    Path,
    typer.Argument(
        metavar="INPUT",
        help="Rows: .jsonl (OpenAI batch format or short), .json, .csv, .tsv, .parquet, .txt, also .gz and .zst; or -.",
    ),
]


class BatchCommand(BatchOptions, EnergyOptions, ViewOptions, total=False):
    """The options of `moedge batch`."""

    output: Annotated[
        Path,
        Option(
            "File for the answers: .jsonl, .csv, .xlsx or .parquet; - is stdout.",
            ...,
            flags=("--output", "-o"),
            panel=Panel.OUTPUT,
            takes=Takes.OUTPUT,
            common=True,
        ),
    ]
    job_dir: Annotated[
        str | Path | None,
        Option(
            "Folder of the job with -o -; the user's state by default, removed at the end.",
            panel=Panel.OUTPUT,
            takes=Takes.FOLDER,
            file_only=True,
            example='"/fast/jobs"',
        ),
    ]


@options.command(BatchCommand)
def batch(model: options.MODEL, input_file: INPUT, **given: Unpack[BatchCommand]) -> None:
    """Answer a file of prompts. The same command resumes a job that was stopped or killed.

    Every input row gives exactly one output row: answers go to OUTPUT, failures to the same name with .errors.jsonl.
    An OUTPUT that ends in .csv, .xlsx or .parquet is a table of all rows. The folder with .job keeps finished rows.
    """
    options.say_device(given["gpu_mem"], given["output_format"] == "human" and not given["quiet"])
    from ..runtime.jobs.request import request_of
    from ..runtime.settings.errors import OutputRefused

    to_stdout = os.fspath(given["output"]) == "-"
    request = request_of(model, input_file, given["output"], given)
    if to_stdout and given["output_format"] == "json":
        raise OutputRefused("-o - and --format json both write to standard output; leave one of them out")
    code = _to_stdout(request, given) if to_stdout else job_view(given).run(request, given["summary"])
    raise typer.Exit(code)


def job_view(given: ViewOptions, answers: AnswerStream | None = None) -> JobView:
    """What shows a job as these options say."""
    from ..energy import energy_of
    from .views.job_view import JobView

    style, shown = given["progress"], given["output_format"]
    energy = energy_of(cast(Mapping[str, Any], given))
    return JobView(style, given["quiet"], shown, verbose=given["verbose"], answers=answers, energy=energy)


def _to_stdout(request: BatchRequest, given: BatchCommand) -> ExitCode:
    from ..runtime.jobs.outputs import AnswerStream
    from .options.stdout import into_folder, remove_finished

    folder = given["job_dir"]
    request = into_folder(request, None if folder is None else Path(folder))
    code = job_view(given, AnswerStream(sys.stdout.buffer)).run(request, given["summary"])
    if code in (ExitCode.OK, ExitCode.SOME_ROWS_FAILED):
        remove_finished(request)
    return code


def demo() -> None:
    """Run a batch job on the bundled 5 M parameter mixture of experts."""
    options.say_device()
    from ..runtime.jobs.request import BatchRequest
    from ..runtime.rows.row import Defaults
    from .views.job_view import JobView

    with as_file(files("moedge.demo")) as bundle, tempfile.TemporaryDirectory() as folder:
        prompts, output = bundle / "prompts.jsonl", Path(folder, "answers.jsonl")
        request = BatchRequest(str(bundle / "model"), prompts, output, defaults=Defaults(max_tokens=120))
        code = JobView("auto", quiet=False, kept=False).run(request, None)
        if output.exists():
            _print_answers(prompts, output)
            print(f"\nNothing of this is kept. The same job, to keep: {_same_job(bundle)}")
    raise typer.Exit(code)


def _same_job(bundle: Path) -> str:
    return shlex.join(["moedge", "batch", f"{bundle / 'model'}", f"{bundle / 'prompts.jsonl'}", "-o", "answers.jsonl"])


def _print_answers(prompts: Path, answers: Path) -> None:
    from ..formatting import escape_controls

    for question, answer in zip(prompts.open(), answers.open(), strict=True):
        print(f"\n> {json.loads(question)['messages'][-1]['content']}")
        print(escape_controls(json.loads(answer)["text"].strip()))
