"""`moedge plan`: what fits where, how fast it will be, and what would help, before a byte of weights is read.

The terminal shows what the JSON document holds (views/plan_view.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..offload.errors import ExitCode
from .options import options

if TYPE_CHECKING:
    from ..runtime.jobs.encode import JobSize
    from ..runtime.plan.planner import PlanRequest
    from ..runtime.source.headers import Headers

INPUT = Annotated[
    Path | None, typer.Argument(metavar="INPUT", help="Rows as `moedge batch` takes them, to be measured.")
]
ROWS = Annotated[int, typer.Option("--rows", min=1, help="Rows of the job, where there is no INPUT.")]
PROMPT_TOKENS = Annotated[
    int, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt, where there is no INPUT.")
]
OUTPUT_TOKENS = Annotated[
    int, typer.Option("--output-tokens", min=1, help="Tokens of an answer, where there is no INPUT.")
]
MACHINE = Annotated[
    Path | None, typer.Option("--machine", help="Plan for the machine that `moedge doctor --json` wrote to this file.")
]
GPU = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help='Plan for a GPU that is not here, by its data sheet: "RTX 3060 12GB".'),
]
EXPLAIN = Annotated[bool, typer.Option("--explain", help="Say what was weighed, and what the numbers rest on.")]
JSON = Annotated[bool, typer.Option("--json", help="Print the plan as JSON: docs/plan.md.")]
SAVE = Annotated[Path | None, typer.Option("--save", help="Write the plan, for `moedge batch --plan FILE`.")]


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
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    machine: MACHINE = None,
    gpu: GPU = None,
    explain: EXPLAIN = False,
    as_json: JSON = False,
    save: SAVE = None,
) -> None:
    """Estimate placement, speed and bottleneck before running; reads headers only, or config.json alone.

    Exits with 4 where the job does not fit, and says what would.
    """
    from ..runtime.jobs.job_plan import equal_rows, measured_job, plan_request
    from ..runtime.settings.settings import Settings
    from ..runtime.source.headers import read_headers

    headers = read_headers(model)
    size = None if input_file is None else measured_job(headers, input_file, max_tokens)
    workload = equal_rows(rows, prompt_tokens, output_tokens) if size is None else size.shape()
    settings = Settings(
        dtype=dtype,
        quant=quant,
        kv=kv,
        tokens_per_pass=tokens_per_pass,
        max_sequences=max_sequences,
        deterministic=deterministic,
        compute=compute,
    )
    budgets = options.budgets(ram, gpu_mem, disk, disk_dir)
    request = plan_request(headers, settings, budgets, machine, workload, gpu)
    raise typer.Exit(_answer(headers, request, size, explain, as_json, save))


def _answer(
    headers: Headers, request: PlanRequest, size: JobSize | None, explain: bool, as_json: bool, save: Path | None
) -> ExitCode:
    from ..runtime.plan.plan_file import document, refusal
    from ..runtime.plan.planner import solve
    from ..runtime.plan.what_if import by_budget, by_sequences, nearest, suggestions
    from ..runtime.settings.errors import DoesNotFit
    from .views.plan_view import print_plan, print_refusal

    model = headers.name
    try:
        result = solve(request)
    except DoesNotFit as error:
        fitting = nearest(request)
        if as_json:
            print(json.dumps(refusal(model, request, str(error), fitting), indent=1))
        else:
            print_refusal(str(error), fitting)
        return ExitCode.DOES_NOT_FIT
    points = [*by_sequences(request, result), *by_budget(request, result)]
    # Rows of equal length fit all of them or not at all.
    left_out = 0 if size is None else size.longer_than(result.plan.kv_tokens)
    found = document(model, result, points, suggestions(request, result), left_out, headers.download)
    text = json.dumps(found, indent=1)
    if save is not None:
        save.write_text(text + "\n")
    if as_json:
        print(text)
    else:
        print_plan(found, explain)
    return ExitCode.OK
