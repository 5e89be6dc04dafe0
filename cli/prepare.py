"""`moedge prepare`: quantizes a checkpoint once, so that jobs open the result in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..offload.errors import ExitCode
from ..runtime.settings.formatting import duration, gib, loss_line
from .options import options


def prepare(
    model: options.MODEL,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; by default one in the user's cache.")
    ] = None,
    quant: options.QUANT = options.Quant.NF4,
    dtype: options.DTYPE = options.DType.AUTO,
    ram: options.RAM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
) -> None:
    """Quantize a checkpoint and save the prepared weights.

    After a kill at any point, the same command resumes the work. On finished prepared weights, it writes damaged files
    again. `moedge batch FOLDER ...` runs prepared weights without the checkpoint.
    """
    import time

    from ..offload.memory import host_peak
    from ..runtime.loading.prepare import precision, store_path
    from ..runtime.loading.prepare import prepare as write_store
    from ..runtime.settings.budgets import Budgets
    from ..runtime.source.model_source import open_source

    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    begun = time.perf_counter()
    with open_source(model) as source:
        formats = precision(source, quant, dtype)
        target = output or store_path(source, *formats, disk_dir)
        say(f"{model} in {formats[0]}, dtype {formats[1]}: {gib(source.packed_nbytes(*formats))} in {target}")
        budgets = Budgets(ram=ram, disk=disk, disk_dir=disk_dir)
        loss = write_store(source, target, *formats, budgets, repair=True)
    if line := loss_line(loss):
        say(line)
    peak, budget = host_peak(), budgets.host_nbytes()
    say(f"done in {duration(time.perf_counter() - begun)}; peak {gib(peak)} of RAM; run: moedge batch {target} ...")
    if ram != "auto" and peak > budget:
        say(f"over budget: {gib(peak)} of RAM used, the budget is {gib(budget)}")
        raise typer.Exit(ExitCode.GAVE_OUT)
