"""`moedge models`: which models run here, and what one of them is made of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..runtime.settings.formatting import count, gib
from .options import options
from .options.configured_command import ConfiguredCommand

if TYPE_CHECKING:
    from ..runtime.shape.model_shape import ModelShape

app = typer.Typer(help="Models: which are here, which run, what one is made of.", no_args_is_help=True)


@app.command(cls=ConfiguredCommand)
def ls(disk_dir: options.DISK_DIR = None) -> None:
    """List prepared stores, and the checkpoints in the hub's local cache with whether they run."""
    from ..offload.store.stores import default_root, stores
    from ..runtime.source.hub import cached_models

    # Lines, not a table: a folder that is cut to fit the terminal cannot be copied into the next command.
    for store in stores(disk_dir or default_root()):
        print(f"{gib(store.nbytes):>12}  {'store' if store.complete else 'store, unfinished'}  {store.folder}")
    for model in cached_models():
        print(f"{gib(model.nbytes):>12}  checkpoint, runs: {model.verdict}  {model.name}")


@app.command()
def rm(store: Annotated[Path, typer.Argument(metavar="STORE", help="The folder of a store.")]) -> None:
    """Remove a store that nobody is using."""
    from ..offload.store.stores import remove

    remove(store)


@app.command(cls=ConfiguredCommand)
def prune(
    keep: Annotated[str, typer.Option("--keep", metavar="SIZE", help="What all stores together may still take.")],
    disk_dir: options.DISK_DIR = None,
) -> None:
    """Remove the stores that were not used for longest, until the rest is small enough."""
    from ..offload.budget import parse_size
    from ..offload.store.stores import default_root
    from ..offload.store.stores import prune as prune_stores

    for removed in prune_stores(disk_dir or default_root(), parse_size(keep, 0, 0)):
        print(f"removed {removed.folder}, {gib(removed.nbytes)}")


@app.command()
def check(store: Annotated[Path, typer.Argument(metavar="STORE", help="The folder of a store.")]) -> None:
    """Read a whole store and compare every shard with its checksum."""
    from ..offload.errors import BadStore
    from ..offload.store.store import Store

    with Store.open(store) as opened:
        spoiled = [place for place, sound in opened.verify() if not sound]
    if spoiled:
        first = spoiled[0]
        raise BadStore(
            f"{len(spoiled)} shards are damaged, first {first.tensor} {first.index} in {first.path}; "
            "`moedge prepare` with the checkpoint makes their files anew"
        )
    print(f"{store}: every shard is as it was written")


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
    from ..runtime.source.headers import describe
    from ..runtime.source.model_source import open_source

    with open_source(model) as source:
        description = describe(source.shape)
        routing = [] if source.store is None else _routing(source.store, source.shape)
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
    for name, text in routing:
        table.add_row(name, text)
    Console().print(table)


def _routing(store: Path, shape: ModelShape) -> list[tuple[str, str]]:
    """What jobs saw of the experts' popularity, layer by layer."""
    from ..runtime.weights.routing_profile import kept, profile_shapes

    profile = kept(store, profile_shapes([layer.experts.count if layer.experts else 0 for layer in shape.layers]))
    lines = []
    for index in range(len(shape.layers)):
        chosen, tokens = profile.get(f"layers.{index}.chosen"), profile.get(f"layers.{index}.tokens")
        if chosen is None or tokens is None or not float(tokens):
            continue
        ordered = chosen.sort(descending=True)
        top = float(ordered.values[: -(-len(chosen) // 5)].sum() / chosen.sum())
        first = ", ".join(map(str, ordered.indices[:8].tolist()))
        lines.append(
            (f"layer {index}", f"a fifth of the experts takes {top:.0%} of {float(tokens):,.0f} tokens: {first}")
        )
    return lines
