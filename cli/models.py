"""`moedge models`: lists and inspects checkpoints and prepared weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from ..formatting import count
from ..offload.budget import gib, parse_size
from ..runtime.settings.option import Option
from ..runtime.settings.options import StoreFolder
from .options import options
from .options.configured_command import ConfiguredCommand

if TYPE_CHECKING:
    from ..runtime.shape.model_shape import ModelShape

app = typer.Typer(help="List and inspect models; remove prepared weights.", no_args_is_help=True)


@app.command(cls=ConfiguredCommand)
@options.command(StoreFolder, disk_dir={"common": True})
def ls(**given: Unpack[StoreFolder]) -> None:
    """List prepared weights, and the checkpoints in the hub's cache that this version can or cannot run."""
    from rich.console import Console

    from ..offload.store.stores import default_root, stores
    from ..runtime.settings.stages import stage, watching
    from ..runtime.source.hub import cached_models
    from .views.progress import stages_on

    # Lines, not a table: a folder that is cut to fit the terminal cannot be copied into the next command.
    prepared = list(stores(root := Path(given["disk_dir"] or default_root())))
    for store in prepared:
        print(f"{gib(store.nbytes):>12}  {'store' if store.complete else 'store, unfinished'}  {store.folder}")
    with watching(stages_on(Console(stderr=True))), stage("looking through the cache of the hub"):
        cached = list(cached_models())
    for model in cached:
        print(f"{gib(model.nbytes):>12}  checkpoint, runs: {model.verdict}  {model.name}")
    if not prepared and not cached:
        options.say(f"No prepared weights in {root}, and no checkpoint in the hub's cache.")


@app.command()
def rm(store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of prepared weights.")]) -> None:
    """Delete a folder of prepared weights that no process uses."""
    from ..offload.store.stores import remove

    remove(store)


class PruneCommand(StoreFolder, total=False):
    """The options of `moedge models prune`."""

    keep: Annotated[str, Option("Most disk space for all prepared weights.", ..., metavar="SIZE", common=True)]


@app.command(cls=ConfiguredCommand)
@options.command(PruneCommand, disk_dir={"common": True})
def prune(**given: Unpack[PruneCommand]) -> None:
    """Delete the least recently used prepared weights until the rest fits a size."""
    from ..offload.store.stores import default_root
    from ..offload.store.stores import prune as prune_stores

    for removed in prune_stores(Path(given["disk_dir"] or default_root()), parse_size(given["keep"], 0, 0)):
        print(f"removed {removed.folder}, {gib(removed.nbytes)}")


@app.command()
def check(store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of prepared weights.")]) -> None:
    """Verify the checksum of every shard of prepared weights."""
    from ..offload.errors import BadStore
    from ..offload.store.store import Store
    from ..runtime.settings.errors import counted

    with Store.open(store) as opened:
        damaged = [extent for extent, intact in opened.verify() if not intact]
    if damaged:
        first = damaged[0]
        raise BadStore(
            f"{counted(len(damaged), 'damaged shard')}, first {first.tensor} {first.index} in {first.path}; "
            "run `moedge prepare` with the checkpoint to write their files again"
        )
    print(f"{store}: all checksums match")


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
    """Show layers, experts, parameters and sizes (reads headers only)."""
    from ..runtime.source.model_source import describe, open_source

    with open_source(model, tokenizer=False) as source:
        description = describe(source.shape)
        routing = [] if source.store is None else _routing(source.store, source.shape)
    if as_json:
        print(description.to_json())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    unrun = "; the checkpoint's own code (auto_map) is not run" if description.own_code else ""
    table.add_row("family", f"{description.model_type}{unrun}")
    table.add_row(
        "parameters", f"{count(description.parameters)}, {count(description.active_parameters)} active per token"
    )
    table.add_row("layers", f"{description.layers}, {description.experts:,} experts in total")
    table.add_row("context", f"{description.context:,} tokens")
    for each in description.stored:
        text = f"{each['format']}, {each['bits']:.2f} bits per weight, {gib(each['nbytes'])}"
        table.add_row(f"stored {each['group']}", text if each["kept"] is None else f"{text}: {each['becomes']}")
    for name, nbytes in description.weights.items():
        table.add_row(f"weights {name}", gib(nbytes))
    for name, token_nbytes in description.kv_per_token.items():
        table.add_row(f"KV cache {name}", f"{gib(token_nbytes)} per token")
    if description.state:
        table.add_row("recurrent state", f"{gib(description.state)} per sequence, however long")
    for name, text in routing:
        table.add_row(name, text)
    Console().print(table)


def _routing(store: Path, shape: ModelShape) -> list[tuple[str, str]]:
    """The popularity of the experts of each layer, as observed by jobs."""
    from ..runtime.weights.streaming import kept, profile_shapes

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
            (
                f"layer {index}",
                f"the most popular 20 % of the experts take {top:.0%} of {float(tokens):,.0f} tokens: {first}",
            )
        )
    return lines
