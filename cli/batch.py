"""`moedge batch`: a file of prompts in, a file of answers out; `moedge demo` does so with bundled ones."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..offload.errors import ExitCode
from .options import options
from .options.paths import new_folder, writable_file

if TYPE_CHECKING:
    from ..runtime.jobs.request import BatchRequest
    from .views.job_view import JobView

OUTPUT = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        callback=writable_file,
        rich_help_panel=options.Panel.OUTPUT,
        help="File for the answers: .jsonl, .csv or .parquet; - is stdout.",
    ),
]
JOB_DIR = Annotated[
    Path | None,
    typer.Option(
        "--job-dir",
        callback=new_folder,
        rich_help_panel=options.Panel.OUTPUT,
        help="Folder of the job with -o -; the user's state by default, removed at the end.",
    ),
]
OVERWRITE = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        rich_help_panel=options.Panel.OUTPUT,
        help="Start over: remove the job of this output and its files first.",
    ),
]


def batch(
    model: options.MODEL,
    input_file: options.INPUT,
    output: OUTPUT,
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    compute: options.COMPUTE = options.Arithmetic.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    tokens_per_pass: options.TOKENS_PER_PASS = None,
    max_sequences: options.MAX_SEQUENCES = None,
    deterministic: options.DETERMINISTIC = False,
    attention: options.ATTENTION = options.Attention.AUTO,
    stream: options.STREAM = options.Stream.AUTO,
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
    plan: options.PLAN = None,
    job_dir: JOB_DIR = None,
    input_format: options.INPUT_FORMAT = options.InputFormat.AUTO,
    prompt_column: options.PROMPT_COLUMN = None,
    id_column: options.ID_COLUMN = None,
    prompt: options.PROMPT = None,
    system: options.SYSTEM = None,
    schema: options.SCHEMA = None,
    chat: options.CHAT = None,
    lenient: options.LENIENT = False,
    until: options.UNTIL = None,
    max_rows: options.MAX_ROWS = None,
    max_failures: options.MAX_FAILURES = None,
    accept_drift: options.ACCEPT_DRIFT = None,
    overwrite: OVERWRITE = False,
    partial: options.PARTIAL = False,
    summary: options.SUMMARY = None,
    progress: options.PROGRESS = options.Progress.AUTO,
    output_format: options.FORMAT = options.Format.HUMAN,
    verbose: options.VERBOSE = False,
    quiet: options.QUIET = False,
) -> None:
    """Answer a file of prompts. The same command resumes a job that was stopped or killed.

    Every input row gives exactly one output row: answers go to OUTPUT, failures to the same name with .errors.jsonl.
    An OUTPUT that ends in .csv or .parquet is a table of all rows. The folder with .job keeps finished rows.
    """
    options.say_device(gpu_mem, output_format is options.Format.HUMAN and not quiet)
    from ..runtime.api.batch import request_of

    request, to_stdout = request_of(model, input_file, output, locals()), os.fspath(output) == "-"
    _check(to_stdout, job_dir, partial, output_format)
    view = _view(progress, quiet, output_format, verbose)
    raise typer.Exit(_to_stdout(request, job_dir, view, summary) if to_stdout else view().run(request, summary))


def _view(
    progress: options.Progress, quiet: bool, output_format: options.Format, verbose: bool
) -> Callable[..., JobView]:
    from .views.job_view import JobView

    return functools.partial(JobView, progress, quiet, output_format, verbose=verbose)


def _check(to_stdout: bool, job_dir: Path | None, partial: bool, output_format: options.Format) -> None:
    """Raises OutputRefused for options that contradict each other."""
    from ..runtime.settings.errors import OutputRefused

    if to_stdout and partial:
        raise OutputRefused("--partial is for a file of answers; -o - writes them while the job runs")
    if to_stdout and output_format is options.Format.JSON:
        raise OutputRefused("-o - and --format json both write to standard output; leave one of them out")
    if job_dir is not None and not to_stdout:
        raise OutputRefused("--job-dir is for -o -; the folder of other jobs is beside OUTPUT")


def _to_stdout(
    request: BatchRequest, job_dir: Path | None, view: Callable[..., JobView], summary: Path | None
) -> ExitCode:
    from ..runtime.jobs.answer_stream import AnswerStream, into_folder, remove_finished

    shown = view(answers=AnswerStream(sys.stdout.buffer))
    request = into_folder(request, job_dir)
    code = shown.run(request, summary)
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
        code = JobView(options.Progress.AUTO, quiet=False, kept=False).run(request, None)
        if output.exists():
            _print_answers(prompts, output)
            print(f"\nNothing of this is kept. The same job, to keep: {_same_job(bundle)}")
    raise typer.Exit(code)


def _same_job(bundle: Path) -> str:
    return shlex.join(["moedge", "batch", f"{bundle / 'model'}", f"{bundle / 'prompts.jsonl'}", "-o", "answers.jsonl"])


def _print_answers(prompts: Path, answers: Path) -> None:
    from ..runtime.settings.formatting import escape_controls

    for question, answer in zip(prompts.open(), answers.open(), strict=True):
        print(f"\n> {json.loads(question)['messages'][-1]['content']}")
        print(escape_controls(json.loads(answer)["text"].strip()))
