"""`moedge plan`: estimates placement, speed and bottleneck before any weights are read.

The terminal shows the contents of the JSON document: tiers with bars, the expected speed, and what would change it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import options

INPUT = Annotated[
    Path | None, typer.Argument(metavar="INPUT", help="Rows to plan for, in the format of `moedge batch`.")
]
ROWS = Annotated[int, typer.Option("--rows", min=1, help="Number of rows, without INPUT.")]
PROMPT_TOKENS = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens per prompt, without INPUT.")]
OUTPUT_TOKENS = Annotated[int, typer.Option("--output-tokens", min=1, help="Tokens per answer, without INPUT.")]
MACHINE = Annotated[
    Path | None, typer.Option("--machine", help="Plan for the machine that `moedge doctor --json` wrote to this file.")
]
EXPLAIN = Annotated[bool, typer.Option("--explain", help="Explain which alternatives were compared.")]
JSON = Annotated[bool, typer.Option("--json", help="Print the plan as JSON: docs/plan.md.")]
SAVE = Annotated[Path | None, typer.Option("--save", help="Write the plan to this file, for `moedge batch --plan`.")]


def plan(
    model: options.MODEL,
    input_file: INPUT = None,
    rows: ROWS = 1000,
    prompt_tokens: PROMPT_TOKENS = 512,
    output_tokens: OUTPUT_TOKENS = 256,
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    compute: options.COMPUTE = options.Arithmetic.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    tokens_per_pass: options.TOKENS_PER_PASS = None,
    max_sequences: options.MAX_SEQUENCES = None,
    deterministic: options.DETERMINISTIC = False,
    max_tokens: options.MAX_TOKENS = 256,
    input_format: options.INPUT_FORMAT = options.InputFormat.AUTO,
    prompt_column: options.PROMPT_COLUMN = None,
    id_column: options.ID_COLUMN = None,
    prompt: options.PROMPT = None,
    system: options.SYSTEM = None,
    schema: options.SCHEMA = None,
    chat: options.CHAT = None,
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    machine: MACHINE = None,
    explain: EXPLAIN = False,
    as_json: JSON = False,
    save: SAVE = None,
) -> None:
    """Estimate placement, speed and bottleneck before running (reads headers only).

    If the job does not fit, prints the nearest job that does and exits with 4.
    """
    from ..runtime.api.plan_report import make_report
    from ..runtime.rows.columns import rows_as
    from ..runtime.rows.row import Defaults
    from ..runtime.rows.tables import InputFormat
    from ..runtime.settings.settings import Settings

    defaults = Defaults(max_tokens=max_tokens)
    if input_file is not None:
        defaults = rows_as(defaults, prompt_column, id_column, prompt, system, schema, chat)
    settings = Settings(
        dtype=dtype,
        quant=quant,
        kv=kv,
        tokens_per_pass=tokens_per_pass,
        max_sequences=max_sequences,
        deterministic=deterministic,
        compute=compute,
    )
    report = make_report(
        model,
        input_file,
        settings,
        options.budgets(ram, gpu_mem, disk, disk_dir),
        rows={"rows": rows, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens},
        defaults=defaults,
        input_format=InputFormat(input_format),
        machine=machine,
    )
    for line in report.left_out:
        print(line, file=sys.stderr)
    if save is not None and report.fits:
        report.save(save)
    if as_json:
        print(report.json())
    else:
        report.print(explain)
