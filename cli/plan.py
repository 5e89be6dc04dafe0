"""`moedge plan`: estimates placement, speed and bottleneck before any weights are read.

The terminal shows the contents of the JSON document: tiers with bars, the expected speed, and what would change it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from ..offload.errors import ExitCode
from ..runtime.settings.option import Option, Takes
from ..runtime.settings.options import PlanOptions
from .options import options

if TYPE_CHECKING:
    from ..plan_report import PlanReport

INPUT = Annotated[
    Path | None, typer.Argument(metavar="INPUT", help="Rows to plan for, in the format of `moedge batch`.")
]


class PlanCommand(PlanOptions, total=False):
    """The options of `moedge plan`."""

    explain: Annotated[
        bool,
        Option("Explain which alternatives were compared, and what the numbers are based on.", False, common=True),
    ]
    as_json: Annotated[bool, Option("The plan as JSON: docs/reference.md.", False, flags=("--json",), common=True)]
    save: Annotated[
        Path | None,
        Option("Write the plan to this file, for `moedge batch --plan`.", takes=Takes.OWN_FILE, common=True),
    ]


@options.command(PlanCommand)
def plan(model: options.MODEL, input_file: INPUT = None, **given: Unpack[PlanCommand]) -> None:
    """Estimate placement, speed and bottleneck before running; reads headers only, or config.json alone.

    If the job does not fit, prints the nearest job that does and exits with 4.
    """
    report = _watched(model, input_file, given)
    for line in report.left_out:
        print(line, file=sys.stderr)
    if given["save"] is not None and report.fits:
        report.save(given["save"])
    if given["as_json"]:
        print(report.json())
    else:
        report.print(given["explain"])
    raise typer.Exit(ExitCode.OK if report.fits else ExitCode.DOES_NOT_FIT)


def _watched(model: str, rows: Path | None, given: PlanCommand) -> PlanReport:
    """The report, with a line that says what is done meanwhile, before it imports what takes long.

    Counting tokens imports torch for many models: a log gets its line first.
    """
    from rich.console import Console

    from ..plan_report import make_report
    from ..runtime.settings.stages import stage, watching
    from .views.progress import stages_on

    announcement = "" if rows is None else f"counting the tokens of {rows}"
    with watching(stages_on(Console(stderr=True))), stage(f"planning {model}", announcement=announcement):
        return make_report(model, rows, given)
