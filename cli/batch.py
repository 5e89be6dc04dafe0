"""`moedge batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .options import options
from .options.paths import writable_file

OUTPUT = Annotated[
    Path,
    typer.Option("--output", "-o", callback=writable_file, help="File for the answers, in the order of the input."),
]
OVERWRITE = Annotated[
    bool, typer.Option("--overwrite", help="Start over: remove the job of this output and its files first.")
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
    temperature: options.TEMPERATURE = 0.0,
    seed: options.SEED = 0,
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    plan: options.PLAN = None,
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

    Every input row gives exactly one output row: answers go to OUTPUT, failures to the same name with .errors.jsonl."""
    from ..runtime.jobs.request import BatchRequest, ResumeOptions
    from ..runtime.jobs.stop import Limits
    from ..runtime.rows.row import Defaults
    from ..runtime.settings.settings import Settings
    from .views.job_view import JobView

    base = Settings(dtype=dtype, quant=quant, kv=kv, compute=compute, attention=attention, deterministic=deterministic)
    request = BatchRequest(
        model=model,
        input=input_file,
        output=output,
        settings=replace(base, tokens_per_pass=tokens_per_pass, max_sequences=max_sequences),
        defaults=Defaults(max_tokens=max_tokens, temperature=temperature, seed=seed),
        budgets=options.budgets(ram, gpu_mem, disk, disk_dir),
        experts=options.experts(stream, hold),
        limits=Limits(until, max_rows, max_failures),
        lenient=lenient,
        resume=ResumeOptions(drift=tuple(accept_drift or ()), overwrite=overwrite),
        plan=plan,
        follow=partial,
    )
    raise typer.Exit(JobView(progress, quiet, output_format, verbose=verbose).run(request, summary))
