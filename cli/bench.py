"""`moedge bench`: the speed of a model here, by number of sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import options
from .options.paths import own_file


def _counts(text: str) -> str:
    """Checks numbers of sequences and returns their text."""
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{text!r} are no numbers of sequences; wanted such as 1,8,32")
    return text


SEQUENCES = Annotated[
    str,
    typer.Option("--sequences", metavar="N,N", parser=_counts, help="Numbers of sequences that run together."),
]
PROMPT_TOKENS = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of each prompt; they are random.")]
MAX_TOKENS = Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens that each sequence generates.")]
JSON = Annotated[Path | None, typer.Option("--json", callback=own_file, help="Write all numbers to this file.")]
PAGE = Annotated[Path | None, typer.Option("--page", callback=own_file, help="Write an HTML page with charts.")]


def bench(
    model: options.MODEL,
    sequences: SEQUENCES = "1,8,32",
    prompt_tokens: PROMPT_TOKENS = 128,
    max_tokens: MAX_TOKENS = 64,
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    compute: options.COMPUTE = options.Arithmetic.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    tokens_per_pass: options.TOKENS_PER_PASS = None,
    max_sequences: options.MAX_SEQUENCES = None,
    deterministic: options.DETERMINISTIC = False,
    attention: options.ATTENTION = options.Attention.AUTO,
    stream: options.STREAM = options.Stream.AUTO,
    seed: options.SEED = 0,
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    as_json: JSON = None,
    page: PAGE = None,
) -> None:
    """Measure how fast a model generates here: latency, throughput, bytes per token and what was predicted.

    The engine is loaded once, with the plan of a `moedge batch` of as many rows as the most sequences.
    """
    options.say_device(gpu_mem)
    document = _measure(locals())
    from .views.bench_view import print_bench

    print_bench(document)
    if as_json is not None:
        as_json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if page is not None:
        from ..runtime.reports.speed_page import speed_page

        page.write_text(speed_page(document))


def _measure(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` are the arguments of the command, by name."""
    from rich.console import Console

    from ..runtime.api.options import experts_of, settings_of
    from ..runtime.settings.stages import stage, watching
    from ..runtime.source.model_source import open_source
    from .views.progress import stages_on

    counts = sorted({int(each) for each in given["sequences"].split(",")})
    budgets = options.budgets(given["ram"], given["gpu_mem"], given["disk"], given["disk_dir"])
    with watching(stages_on(Console(stderr=True, highlight=False))):
        with open_source(given["model"]):
            # A model that is refused is refused before torch is imported.
            pass
        with stage("importing torch"):
            from ..runtime.evaluation.speed import Load
            from ..runtime.evaluation.speed import bench as measure
        load = Load(counts, given["prompt_tokens"], given["max_tokens"], given["seed"])
        return measure(given["model"], settings_of(given), budgets, experts_of(given), load)
