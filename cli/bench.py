"""`moedge bench`: the speed of a model here, by number of sequences."""

import json
from pathlib import Path
from typing import Annotated, Any, Unpack

import typer

from ..runtime.settings.applications import application
from ..runtime.settings.errors import SettingError
from ..runtime.settings.option import Option, Takes
from ..runtime.settings.options import EngineOptions, SeedOptions, StreamingOptions
from .options import options


def _counts(text: str) -> str:
    """Checks numbers of sequences and returns their text."""
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{text!r} are no numbers of sequences; wanted such as 1,8,32")
    return text


class BenchCommand(EngineOptions, StreamingOptions, SeedOptions, total=False):
    """The options of `moedge bench`."""

    prompt_tokens: Annotated[int, Option("Tokens of each prompt; they are random.", 128, low=1, common=True)]
    max_tokens: Annotated[int, Option("Tokens that each sequence generates.", 64, low=1, common=True)]
    as_json: Annotated[
        Path | None,
        Option("Write all numbers to this file.", flags=("--json",), takes=Takes.OWN_FILE, common=True),
    ]
    page: Annotated[Path | None, Option("Write an HTML page with charts.", takes=Takes.OWN_FILE, common=True)]


SEQUENCES = Annotated[
    str,
    typer.Option("--sequences", metavar="N,N", parser=_counts, help="Numbers of sequences that run together."),
]


@options.command(BenchCommand, compute={"file_only": False, "key": True, "common": True})
def bench(model: options.MODEL, sequences: SEQUENCES = "1,8,32", **given: Unpack[BenchCommand]) -> None:
    """Measure how fast a model generates here: latency, throughput, bytes per token and what was predicted.

    The engine is loaded once, with the plan of a `moedge batch` of as many rows as the most sequences.
    """
    options.say_device(given["gpu_mem"])
    charts: Any = None if given["page"] is None else application("reports", "page")
    if given["page"] is not None and charts is None:
        raise SettingError(
            "--page is written by the application `reports`, which is left out here; --json has all numbers"
        )
    document = _measure(model, sequences, given)
    from .views.bench_view import print_bench

    print_bench(document)
    if given["as_json"] is not None:
        given["as_json"].write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if given["page"] is not None:
        given["page"].write_text(charts.speed_page(document))


def _measure(model: str, sequences: str, given: BenchCommand) -> dict[str, Any]:
    from rich.console import Console

    from ..runtime.jobs.request import budgets_of, settings_of, stream_of
    from ..runtime.settings.stages import importing, watching
    from ..runtime.source.model_source import open_source
    from .views.progress import stages_on

    counts = sorted({int(each) for each in sequences.split(",")})
    with watching(stages_on(Console(stderr=True, highlight=False))):
        with open_source(model):
            # A model that is refused is refused before torch is imported.
            pass
        with importing("torch"):
            from ..runtime.evaluation.speed import Load
            from ..runtime.evaluation.speed import bench as measure
        load = Load(counts, given["prompt_tokens"], given["max_tokens"], given["seed"])
        return measure(model, settings_of(given), budgets_of(given), stream_of(given), load)
