"""`moedge prepare`: packs a checkpoint into a store once, so that jobs open it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..offload.errors import ExitCode
from ..runtime.settings.formatting import duration, gib
from .options import options


def prepare(
    model: options.MODEL,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The store's folder; by default one among the user's stores.")
    ] = None,
    quant: options.QUANT = options.Quant.NF4,
    dtype: options.DTYPE = options.DType.AUTO,
    ram: options.RAM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
) -> None:
    """Pack a checkpoint into a store.

    Killed at any point it goes on where it was when it is run again; run on a finished store it makes damaged files
    anew. `moedge batch STORE ...` needs no checkpoint.
    """
    import time

    from ..offload.memory import host_peak
    from ..runtime.loading.prepare import place_for, precision
    from ..runtime.loading.prepare import prepare as write_store
    from ..runtime.settings.budgets import Budgets
    from ..runtime.source.model_source import open_source

    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    begun = time.perf_counter()
    with open_source(model) as source:
        formats = precision(source, quant, dtype)
        target = output or place_for(source, *formats, disk_dir)
        say(f"{model} in {formats[0]}, arithmetic {formats[1]}: {gib(source.packed_nbytes(*formats))} in {target}")
        budgets = Budgets(ram=ram, disk=disk, disk_dir=disk_dir)
        write_store(source, target, *formats, budgets, repair=True)
    peak, budget = host_peak(), budgets.host_nbytes()
    say(f"done in {duration(time.perf_counter() - begun)}; peak {gib(peak)} of host memory; give {target} as MODEL")
    if ram != "auto" and peak > budget:
        say(f"over budget: {gib(budget)} of host memory were granted")
        raise typer.Exit(ExitCode.GAVE_OUT)
