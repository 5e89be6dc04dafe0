"""`moedge doctor`: examines and measures a machine, and prints a fix for every problem."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from ...cli.face import command, say_device
from ...face import ExitCode, counted, option, options

if TYPE_CHECKING:
    from .examination import Examination

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class DoctorCommand(options.StoreFolder, total=False):
    """The options of `moedge doctor`."""

    quick: Annotated[bool, option.Option("Only look; measure and try nothing.", False, common=True)]
    as_json: Annotated[
        bool,
        option.Option(
            "Print the machine profile and the findings as JSON: docs/reference.md.",
            False,
            flags=("--json",),
            common=True,
        ),
    ]


@command(DoctorCommand, disk_dir={"common": True})
def doctor(**given: Unpack[DoctorCommand]) -> None:
    """Check and measure this machine, so that plans fit it.

    Every finding is ok, warn (it costs speed or memory) or fail (it prevents a run), with a fix. The measurements are
    saved for plans until the hardware changes. Exits with 6 if anything failed.
    """
    say_device()
    from rich.console import Console

    from ...face import default_root
    from .examination import examine
    from .host import Verdict

    console = Console(stderr=True, highlight=False)
    waiting = console.status("checking")
    watched: AbstractContextManager[object] = waiting if console.is_terminal else nullcontext()
    with watched:
        say = waiting.update if console.is_terminal else console.print
        examination = examine(Path(given["disk_dir"] or default_root()), given["quick"], say)
    if given["as_json"]:
        print(json.dumps(examination.as_json(), indent=1))
    else:
        _print(examination)
    raise typer.Exit(ExitCode.ENVIRONMENT if examination.count(Verdict.FAIL) else ExitCode.OK)


def _print(examination: Examination) -> None:
    if not sys.stdout.isatty():
        for finding in examination.findings:
            print(f"{finding.verdict:4}  {finding.name:12}  {finding.found}")
            if finding.fix:
                print(f"{'':20}fix: {finding.fix}")
        print(_conclusion(examination))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in examination.findings:
        table.add_row(Text(finding.verdict, _STYLES[finding.verdict]), finding.name, Text(finding.found))
        if finding.fix:
            table.add_row("", "", Text(f"fix: {finding.fix}", "cyan"))
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(_conclusion(examination))


def _conclusion(examination: Examination) -> str:
    failed, warned = (
        sum(finding.verdict == verdict for finding in examination.findings) for verdict in ("fail", "warn")
    )
    if not failed and not warned:
        return "no problems found"
    return f"{counted(failed, 'failure')}, {counted(warned, 'warning')}"
