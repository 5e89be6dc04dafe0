"""`moedge check`: an engine's logits beside those of transformers for the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..offload.errors import ExitCode
from .options import options
from .options.paths import own_file

if TYPE_CHECKING:
    from ..runtime.evaluation.check import CheckReport
    from ..runtime.settings.budgets import Budgets

PROMPT = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="A prompt to compute, as it is; may be repeated. Some are built in."),
]
AGAINST = Annotated[
    str | None,
    typer.Option("--against", metavar="CHECKPOINT", help="Where MODEL is prepared weights: what they were made from."),
]
JSON = Annotated[Path | None, typer.Option("--json", callback=own_file, help="Write all numbers to this file.")]


def check(
    model: options.MODEL,
    prompt: PROMPT = None,
    against: AGAINST = None,
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    compute: options.COMPUTE = options.Arithmetic.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    deterministic: options.DETERMINISTIC = False,
    ram: options.RAM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    as_json: JSON = None,
) -> None:
    """Compare the logits of a model with those of transformers, in float32.

    moedge computes a few prompts on the CPU, by default in the files' own precision, and transformers computes them
    again, with weights that mean what the format's codes do: the whole checkpoint if it fits `--ram`, else a layer at a
    time. Products and attention of every layer are compared with the definition of their format, too. Exits with 3 if
    anything differs by more than rounding, and names what is first.
    """
    settings = {"quant": quant, "dtype": dtype, "compute": compute, "kv": kv, "deterministic": deterministic}
    found = _check(model, prompt or [], against, settings, options.budgets(ram, "0", disk, disk_dir))
    from .views.check_view import print_check

    print_check(found)
    if as_json is not None:
        as_json.write_text(json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n")
    if not found.within:
        raise typer.Exit(ExitCode.SOME_ROWS_FAILED)


def _check(
    model: str, prompts: list[str], against: str | None, settings: dict[str, Any], budgets: Budgets
) -> CheckReport:
    from rich.console import Console

    from ..runtime.settings.stages import stage, watching
    from ..runtime.source.model_source import open_source
    from .views.progress import stages_on

    with watching(stages_on(Console(stderr=True, highlight=False))):
        for each in (model, against):
            if each is not None:
                with open_source(each, tokenizer=False):
                    # A model that is refused is refused before torch is imported.
                    pass
        with stage("importing torch"):
            from ..runtime.evaluation.check import check as compare
        return compare(model, prompts, against=against, budgets=budgets, **settings)
