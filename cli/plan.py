"""`moedge plan`: estimates placement, speed and bottleneck before any weights are read.

The terminal shows the contents of the JSON document: tiers with bars, the expected speed, and what would change it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..offload.errors import ExitCode
from .options import options
from .options.paths import own_file, readable_file

if TYPE_CHECKING:
    from ..runtime.api.plan_report import PlanReport

INPUT = Annotated[
    Path | None, typer.Argument(metavar="INPUT", help="Rows to plan for, in the format of `moedge batch`.")
]
ROWS = Annotated[int, typer.Option("--rows", min=1, help="Number of rows, without INPUT.")]
PROMPT_TOKENS = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens per prompt, without INPUT.")]
OUTPUT_TOKENS = Annotated[int, typer.Option("--output-tokens", min=1, help="Tokens per answer, without INPUT.")]
MACHINE = Annotated[
    Path | None,
    typer.Option(
        "--machine", callback=readable_file, help="Plan for the machine that `moedge doctor --json` wrote to this file."
    ),
]
GPU = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help='Plan for a GPU that is not here, by its data sheet: "RTX 3060 12GB".'),
]
EXPLAIN = Annotated[
    bool, typer.Option("--explain", help="Explain which alternatives were compared, and what the numbers are based on.")
]
JSON = Annotated[bool, typer.Option("--json", help="Print the plan as JSON: docs/plan.md.")]
SAVE = Annotated[
    Path | None,
    typer.Option("--save", callback=own_file, help="Write the plan to this file, for `moedge batch --plan`."),
]


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
    gpu: GPU = None,
    explain: EXPLAIN = False,
    as_json: JSON = False,
    save: SAVE = None,
) -> None:
    """Estimate placement, speed and bottleneck before running; reads headers only, or config.json alone.

    If the job does not fit, prints the nearest job that does and exits with 4.
    """
    report = _watched(locals())
    for line in report.left_out:
        print(line, file=sys.stderr)
    if save is not None and report.fits:
        report.save(save)
    if as_json:
        print(report.json())
    else:
        report.print(explain)
    raise typer.Exit(ExitCode.OK if report.fits else ExitCode.DOES_NOT_FIT)


def _watched(given: Mapping[str, Any]) -> PlanReport:
    """The report, with a line that says what is done meanwhile, before it imports what takes long.

    Counting tokens imports torch for many models: a log gets its line first.
    """
    from rich.console import Console

    from ..runtime.settings.stages import stage, watching
    from .views.progress import stages_on

    rows = given["input_file"]
    announcement = "" if rows is None else f"counting the tokens of {rows}"
    with watching(stages_on(Console(stderr=True))), stage(f"planning {given['model']}", announcement=announcement):
        return _report(given)


def _report(given: Mapping[str, Any]) -> PlanReport:
    """`given` are the arguments of the command, by name."""
    from ..runtime.api.options import input_format_of, row_defaults_of, settings_of
    from ..runtime.api.plan_report import make_report
    from ..runtime.rows.row import Defaults

    return make_report(
        given["model"],
        given["input_file"],
        settings_of(given),
        options.budgets(given["ram"], given["gpu_mem"], given["disk"], given["disk_dir"]),
        rows={name: given[name] for name in ("rows", "prompt_tokens", "output_tokens")},
        defaults=row_defaults_of(given, Defaults(max_tokens=given["max_tokens"])),
        input_format=input_format_of(given),
        machine=given["machine"],
        gpu=given["gpu"],
    )
