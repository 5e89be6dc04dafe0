"""`moedge batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options


def batch(
    model: options.MODEL,
    input_file: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Rows: OpenAI batch lines or short ones, .jsonl or .jsonl.gz.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Answers in input order; must not exist yet.")],
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    compute: options.COMPUTE = options.Arithmetic.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    tokens_per_pass: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one pass over the weights at most; chosen by job and memory.")
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences generated together at most.")] = 128,
    deterministic: options.DETERMINISTIC = False,
    max_tokens: options.MAX_TOKENS = 256,
    temperature: options.TEMPERATURE = 0.0,
    seed: options.SEED = 0,
    ram: options.RAM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    lenient: Annotated[bool, typer.Option("--lenient", help="Malformed lines become error rows.")] = False,
    summary: Annotated[Path | None, typer.Option("--summary", help="Write the run's numbers here, as JSON.")] = None,
    progress: Annotated[
        options.Progress, typer.Option(help="auto is bars on a terminal, plain lines elsewhere.")
    ] = options.Progress.AUTO,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Answer a file of prompts.

    Every input row gives exactly one output row: answers in OUTPUT, failures in OUTPUT's name with .errors.jsonl.
    """
    from ..runtime.jobs.batch_run import BatchRequest
    from ..runtime.jobs.rows import Defaults
    from ..runtime.plan.budgets import Budgets
    from ..runtime.plan.planner import Settings
    from .job_view import JobView

    request = BatchRequest(
        model=model,
        input=input_file,
        output=output,
        settings=Settings(dtype, quant, kv, tokens_per_pass, max_sequences, deterministic, compute),
        defaults=Defaults(max_tokens=max_tokens, temperature=temperature, seed=seed),
        budgets=Budgets(ram, disk, disk_dir),
        lenient=lenient,
    )
    raise typer.Exit(JobView(progress, quiet).run(request, summary))
