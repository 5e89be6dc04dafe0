"""`moedge models`: which models run here, and what one of them is made of."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import options
from .wording import count, gib

app = typer.Typer(help="Models: which are here, which run, what one is made of.", no_args_is_help=True)


@app.command()
def ls() -> None:
    """List the checkpoints in the hub's local cache and whether they run."""
    from ..runtime.cached_models import cached_models

    table = Table("model", "size", "runs", box=None)
    for model in cached_models():
        table.add_row(model.name, gib(model.nbytes), model.verdict)
    Console().print(table)


@app.command()
def families() -> None:
    """List the model families that moedge runs."""
    from ..runtime.shape.families import SUPPORTED

    for name in SUPPORTED:
        print(name)


@app.command()
def show(
    model: options.MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the shape as JSON.")] = False,
) -> None:
    """Show layers, experts, parameters and sizes; reads headers only."""
    from ..runtime.describe import describe
    from ..runtime.hub import find_model

    description = describe(find_model(model))
    if as_json:
        print(description.to_json())
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_row("family", description.model_type)
    table.add_row(
        "parameters", f"{count(description.parameters)}, of which {count(description.active_parameters)} per token"
    )
    table.add_row("layers", f"{description.layers}, {description.experts:,} experts in all")
    table.add_row("context", f"{description.context:,} tokens")
    for name, nbytes in description.weights.items():
        table.add_row(f"weights {name}", gib(nbytes))
    for name, token_nbytes in description.kv_per_token.items():
        table.add_row(f"KV cache {name}", f"{token_nbytes / 1024:,.1f} KiB per token")
    Console().print(table)
