"""`moedge check`: an engine's logits beside those of transformers for the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from ..offload.errors import ExitCode
from ..runtime.settings.option import Option, Takes, options_of
from ..runtime.settings.options import HostBudgets, PrecisionOptions
from .options import options

if TYPE_CHECKING:
    from ..runtime.evaluation.check import CheckReport


class CheckCommand(HostBudgets, PrecisionOptions, total=False):
    """The options of `moedge check`."""

    prompt: Annotated[
        list[str] | None,
        Option("A prompt to compute, as it is; may be repeated. Some are built in.", metavar="TEXT", common=True),
    ]
    against: Annotated[
        str | None,
        Option("Where MODEL is prepared weights: what they were made from.", metavar="CHECKPOINT", common=True),
    ]
    as_json: Annotated[
        Path | None,
        Option("Write all numbers to this file.", flags=("--json",), takes=Takes.OWN_FILE, common=True),
    ]


@options.command(
    CheckCommand,
    dtype={"common": True},
    compute={"file_only": False, "key": True, "common": True},
    deterministic={"common": True},
)
def check(model: options.MODEL, **given: Unpack[CheckCommand]) -> None:
    """Compare the logits of a model with those of transformers, in float32.

    moedge computes a few prompts on the CPU, by default in the files' own precision, and transformers computes them
    again, with weights that mean what the format's codes do: the whole checkpoint if it fits `--ram`, else a layer at a
    time. Products and attention of every layer are compared with the definition of their format, too. Exits with 3 if
    anything differs by more than rounding, and names what is first.
    """
    found = _check(model, given)
    from .views.bench_view import print_check

    print_check(found)
    if given["as_json"] is not None:
        given["as_json"].write_text(json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n")
    if not found.within:
        raise typer.Exit(ExitCode.SOME_ROWS_FAILED)


def _check(model: str, given: CheckCommand) -> CheckReport:
    from rich.console import Console

    from ..runtime.jobs.request import budgets_of, weight_format
    from ..runtime.settings.stages import importing, watching
    from ..runtime.source.model_source import open_source
    from .views.progress import stages_on

    with watching(stages_on(Console(stderr=True, highlight=False))):
        for each in (model, given["against"]):
            if each is not None:
                with open_source(each, tokenizer=False):
                    # A model that is refused is refused before torch is imported.
                    pass
        with importing("torch"):
            from ..runtime.evaluation.check import check as compare
        asked: Mapping[str, Any] = given
        precision = {name: asked[name] for name in options_of(PrecisionOptions)}
        precision["quant"] = weight_format(precision["quant"], {"experts": precision.pop("experts")})
        budgets = budgets_of({**given, "gpu_mem": "0"})
        return compare(model, given["prompt"] or [], against=given["against"], **precision, budgets=budgets)
