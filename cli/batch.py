"""`moedge batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..offload.errors import ExitCode
from .options import options

if TYPE_CHECKING:
    from ..runtime.jobs.request import BatchRequest
    from ..runtime.rows.row import Defaults

OUTPUT = Annotated[
    Path,
    typer.Option("--output", "-o", help="File for the answers: .jsonl, .csv or .parquet; - is stdout."),
]
JOB_DIR = Annotated[
    Path | None,
    typer.Option("--job-dir", help="Folder of the job with -o -; the user's state by default, removed at the end."),
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
    hold: options.HOLD = options.Hold.POPULAR,
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
    summary: options.SUMMARY = None,
    progress: options.PROGRESS = options.Progress.AUTO,
    output_format: options.FORMAT = options.Format.HUMAN,
    quiet: options.QUIET = False,
) -> None:
    """Answer a file of prompts. The same command resumes a job that was stopped or killed.

    Every input row gives exactly one output row: answers go to OUTPUT, failures to the same name with .errors.jsonl.
    An OUTPUT that ends in .csv or .parquet is a table of all rows. Finished rows are kept in the folder of the same
    name with .job until you remove it.
    """
    request = _request(locals())
    if os.fspath(output) == "-":
        raise typer.Exit(_to_stdout(request, job_dir, progress, quiet, output_format, summary))
    raise typer.Exit(_to_file(request, job_dir, progress, quiet, output_format, summary))


def _request(given: Mapping[str, Any]) -> BatchRequest:
    """`given` are the arguments of the command, by name."""
    from ..runtime.api.options import input_format_of, row_defaults_of, settings_of
    from ..runtime.jobs.request import BatchRequest, ResumeOptions
    from ..runtime.jobs.stop import Limits
    from ..runtime.sampling.model_defaults import unset_names

    return BatchRequest(
        model=given["model"],
        input=given["input_file"],
        output=given["output"],
        settings=settings_of(given),
        defaults=row_defaults_of(given, _defaults(given)),
        input_format=input_format_of(given),
        unset=unset_names(given["temperature"]),
        budgets=options.budgets(given["ram"], given["gpu_mem"], given["disk"], given["disk_dir"]),
        experts=options.experts(given["stream"], given["hold"]),
        limits=Limits(given["until"], given["max_rows"], given["max_failures"]),
        lenient=given["lenient"],
        resume=ResumeOptions(drift=tuple(given["accept_drift"] or ())),
        plan=given["plan"],
    )


def _defaults(given: Mapping[str, Any]) -> Defaults:
    """What rows get that do not say otherwise, as far as the command says it."""
    from ..runtime.rows.row import Defaults

    effort = given["reasoning_effort"]
    return Defaults(
        max_tokens=given["max_tokens"],
        temperature=given["temperature"] or 0.0,
        seed=given["seed"],
        max_thinking_tokens=given["max_thinking_tokens"],
        chat_template_kwargs=given["chat_template_kwargs"] or "",
        reasoning_effort=None if effort is None else str(effort),
    )


def _to_file(
    request: BatchRequest,
    job_dir: Path | None,
    progress: options.Progress,
    quiet: bool,
    output_format: options.Format,
    summary: Path | None,
) -> ExitCode:
    from ..runtime.settings.errors import OutputRefused
    from .views.job_view import JobView

    if job_dir is not None:
        raise OutputRefused("--job-dir is for -o -; the folder of other jobs is beside OUTPUT")
    return JobView(progress, quiet, output_format).run(request, summary)


def _to_stdout(
    request: BatchRequest,
    job_dir: Path | None,
    progress: options.Progress,
    quiet: bool,
    output_format: options.Format,
    summary: Path | None,
) -> ExitCode:
    from ..runtime.jobs.answer_stream import AnswerStream, into_folder, remove_finished
    from ..runtime.settings.errors import OutputRefused
    from .views.job_view import JobView

    if output_format is options.Format.JSON:
        raise OutputRefused("-o - and --format json both write to standard output; leave one of them out")
    request = into_folder(request, job_dir)
    view = JobView(progress, quiet, output_format, AnswerStream(sys.stdout.buffer))
    code = view.run(request, summary)
    if code in (ExitCode.OK, ExitCode.SOME_ROWS_FAILED):
        remove_finished(request)
    return code
