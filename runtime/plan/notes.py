"""What a person should know of a plan beside its figures. Torch-free."""

from __future__ import annotations

from ...offload.budget import gib
from ...quant.formats.format import QUANT_FORMATS, get_format
from ...quant.kernels.gpu import Gpu, dotted
from ..settings.settings import MIB, Settings
from ..shape.model_shape import ModelShape
from ..shape.read import OUTER, SMALL
from ..shape.shards import (
    BESIDE_KEPT,
    POPULAR_NBYTES,
    ModelShards,
    offered_formats,
    tables_nbytes,
    token_rows_nbytes,
)
from .candidate import WeightFootprint

# `auto` takes a less lossy weight format if its time is at most this multiple of the fastest.
WORTH = 1.5


def plan_notes(weights: WeightFootprint, settings: Settings, live: int) -> tuple[str, ...]:
    """All notes on a plan of such weights for `live` sequences."""
    shape = weights.shape
    return (
        *_code_notes(shape),
        *dtype_notes(settings.dtype, shape.dtype, weights.gpu),
        *_state_notes(shape, live),
        *_head_notes(weights.shards, shape),
        *_table_notes(shape),
        *_packing_notes(shape, settings.quant, weights.quant),
        *_shared_notes(weights.shards),
    )


def dtype_notes(wanted: str, checkpoint: str, gpu: Gpu | None) -> tuple[str, ...]:
    """Notes on the dtype on a GPU without tensor cores for bfloat16."""
    if gpu is None or gpu.computes_bf16:
        return ()
    why = f"compute capability {dotted(gpu.capability)} has no tensor cores for bfloat16"
    if wanted == "bf16":
        return (f"{why}: --dtype bf16 is several times slower than fp16 on it; --dtype auto takes fp16",)
    if wanted == "auto" and checkpoint == "bf16":
        return (f"dtype is fp16: {why}",)
    return ()


def _code_notes(shape: ModelShape) -> tuple[str, ...]:
    if not shape.own_code:
        return ()
    return (f"the checkpoint's own code (auto_map) is not run: {shape.model_type} is computed by transformers' class",)


def _state_notes(shape: ModelShape, live: int) -> tuple[str, ...]:
    """What a person should know of recurrent layers."""
    if not shape.state_groups or live > 1:
        return ()
    return ("prefixes are not shared: one sequence at a time keeps no state of recurrent layers where a prefix ends",)


def _head_notes(shards: ModelShards, shape: ModelShape) -> tuple[str, ...]:
    if not shape.mtp:
        return ()
    return (f"with the checkpoint's own head for drafts: a layer more, of {gib(shards.layers[-1].nbytes)}",)


def _shared_notes(shards: ModelShards) -> tuple[str, ...]:
    nbytes = shards.shared_nbytes
    return (f"{-(-nbytes // MIB)} MiB of blocks that layers share are held once, and never streamed",) if nbytes else ()


def _table_notes(shape: ModelShape) -> tuple[str, ...]:
    """What stays on the disk whatever fits, and what reading it takes."""
    if not shape.tables:
        return ()
    rows, memory = sum(table.per_token for table in shape.tables), len(shape.tables) * POPULAR_NBYTES
    return (
        f"{gib(tables_nbytes(shape))} of n-grams stay on the disk: a token looks up {rows} rows, "
        f"{token_rows_nbytes(shape):,} bytes, of which {memory // MIB} MiB of memory keep the popular ones",
    )


def _packing_notes(shape: ModelShape, wanted: str, quant: str) -> tuple[str, ...]:
    """Which weights of a quantized checkpoint are packed again, in what, and why."""
    kept = get_format(quant).parts[0] not in QUANT_FORMATS
    coded = [each for each in shape.stored if each.kept is not None and each.group not in (OUTER, SMALL)]
    again = [f"{each.group} ({each.format})" for each in coded if not (kept and each.kept)]
    if not again or quant == "none":
        return ()
    why = f"--quant {wanted}"
    if wanted == "auto":
        first = offered_formats(shape)[0]
        why = f"in {first} they do not fit, or take more than {WORTH:g} times as long"
        if quant == first:
            why = "no weight format has their codes, and none of those has more bits"
    made = BESIDE_KEPT if kept else quant
    return (f"packed again in {made}: {', '.join(again)}; {why}",)
