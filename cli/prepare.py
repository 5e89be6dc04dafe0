"""`moedge prepare`: quantizes a checkpoint once, so that jobs open the result in seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from ..formatting import duration, loss_line
from ..offload.budget import gib
from ..offload.errors import ExitCode
from ..runtime.settings.option import Option, Takes
from ..runtime.settings.options import HostBudgets, WeightOptions
from .options import options

if TYPE_CHECKING:
    from ..runtime.settings.settings import Budgets


class PrepareCommand(HostBudgets, WeightOptions, total=False):
    """The options of `moedge prepare`."""

    output: Annotated[
        Path | None,
        Option(
            "Folder to write; by default one in the user's cache.",
            flags=("--output", "-o"),
            takes=Takes.FOLDER,
            common=True,
        ),
    ]
    calibrate: Annotated[
        Path | None,
        Option(
            "Let errors in --experts count by what this text, UTF-8, brings to each column of each expert.",
            takes=Takes.INPUT,
        ),
    ]


_QUANT = "Quantize weights to this format; by default nf4, or what a quantized checkpoint has."


@options.command(
    PrepareCommand, quant={"default": None, "help": _QUANT}, dtype={"common": True}, disk_dir={"common": True}
)
def prepare(model: options.MODEL, **given: Unpack[PrepareCommand]) -> None:
    """Quantize a checkpoint and save the prepared weights.

    After a kill at any point, the same command resumes the work. On finished prepared weights, it writes damaged files
    again. `moedge batch FOLDER ...` runs prepared weights without the checkpoint.
    """
    from rich.console import Console

    from ..runtime.jobs.request import budgets_of
    from ..runtime.settings.stages import watching
    from .options.signals import Stopped, StopSignals
    from .views.progress import say, stages_on

    console = Console(stderr=True, highlight=False)
    budgets = budgets_of({**given, "gpu_mem": "0"})
    try:
        with StopSignals(), watching(stages_on(console)):
            _prepare(model, given, budgets, partial(say, console))
    except Stopped as stopped:
        say(console, "Interrupted: finished layers are kept; run the same command again to continue.")
        raise typer.Exit(stopped.code) from None


def _prepare(model: str, given: PrepareCommand, budgets: Budgets, say: Callable[[str], None]) -> None:
    import time

    say(f"preparing {model}")
    from ..offload.memory import host_peak
    from ..runtime.jobs.request import weight_format
    from ..runtime.settings.stages import importing
    from ..runtime.source.model_source import open_source

    begun = time.perf_counter()
    text = _calibration_text(given)
    with open_source(model) as source:
        with importing("torch"):
            from ..runtime.loading.prepare import calibrate, precision, store_path
            from ..runtime.loading.prepare import prepare as write_store
            from ..runtime.shape.shards import bits_lost, default_format, weights_nbytes
        formats = precision(
            source, weight_format(given["quant"] or default_format(source.shape), given), given["dtype"]
        )
        importance = calibrate(source, text, formats[1], budgets) if text else None
        digest = importance.digest if importance else ""
        target = given["output"] or store_path(source, *formats, budgets.disk_dir, calibration=digest)
        say(f"{model} in {formats[0]}, dtype {formats[1]}: {gib(weights_nbytes(source.shape, *formats))} in {target}")
        budget = budgets.on_cpu()
        written = write_store(source, target, *formats, budget, repair=True, importance=importance)
    if line := loss_line(written.loss, bits_lost(source.shape, formats[0])):
        say(line)
    peak = host_peak()
    say(f"done in {duration(time.perf_counter() - begun)}; peak {gib(peak)} of RAM; run: moedge batch {target} ...")
    if budgets.ram != "auto" and peak > budget.host_nbytes:
        say(f"over budget: {gib(peak)} of RAM used, the budget is {gib(budget.host_nbytes)}")
        raise typer.Exit(ExitCode.GAVE_OUT)


def _calibration_text(given: PrepareCommand) -> str:
    """The text of `--calibrate`; "" without one. Raises SettingError."""
    from ..runtime.settings.errors import SettingError
    from ..runtime.settings.options import SAME

    file = given["calibrate"]
    if file is None:
        return ""
    if given["experts"] == SAME:
        raise SettingError("--calibrate weighs errors in formats of --experts; give one of them, too")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"{file} is no text in UTF-8 ({error}); convert it") from None
