"""Prepares the store of a checkpoint, or finds the one that was prepared before."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...offload.budget import gib
from ...offload.memory import keep_memory
from ...offload.store.stores import default_root, disk_budget, disk_nbytes, store_folder
from ...offload.store.writer import StoreWriter
from ...quant.matmul.matmul import ParallelMatmul, Workspace, kernel_order
from ...quant.tensor import TORCH_DTYPES
from ..model.definition import define
from ..plan.placement import Plan, Workload
from ..plan.planner import budget_range, make_plan
from ..settings.budgets import Budgets, MemoryBudget
from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import Settings
from ..settings.stages import stage
from ..shape.checkpoint_shape import open_checkpoint, read_tensors
from ..shape.config import ModelConfig
from ..shape.model_shape import shape_to_json
from ..shape.shards import model_shards, offered_formats, settled_format, weights_nbytes
from ..source.model_source import ModelSource, model_fingerprint, recipe
from ..source.stored_model import write_resident
from ..weights.key_offsets import FILE, MAX_TOKENS, fixed_token_ids, keep, measure
from ..weights.preparation import Preparation, StoreSink, window_nbytes
from .engine_loader import load_engine


def precision(source: ModelSource, quant: str, dtype: str) -> tuple[str, str]:
    """The weight format and dtype of a store; "auto" means the checkpoint's own. Raises SettingError for a store."""
    if source.store is not None:
        raise SettingError(f"{source.store} is a store already; give the checkpoint that it was made from")
    packed = offered_formats(source.shape)[0] if quant == "auto" else settled_format(source.shape, quant)
    return packed, source.shape.dtype if dtype == "auto" else dtype


def store_path(source: ModelSource, quant: str, dtype: str, root: Path | None, device_type: str | None = None) -> Path:
    """The path of the store of this checkpoint in this format, whether it exists or not.

    Codes lie as kernels of `device_type` read them, "cpu" or "cuda"; None: of what this machine has.
    """
    made_of = _recipe(quant, dtype, device_type)
    return store_folder(root or default_root(), source.name, model_fingerprint(source.weights), made_of)


def _recipe(quant: str, dtype: str, device_type: str | None) -> Mapping[str, Any]:
    there = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return recipe(quant, dtype, kernel_order(quant, TORCH_DTYPES[dtype], there))


class Written(NamedTuple):
    """The bytes that a run wrote into a store, and what weights of a quantized checkpoint lost that it packed again, by
    group (PackingLoss)."""

    nbytes: int = 0
    loss: Mapping[str, float] = MappingProxyType({})


def prepare(
    source: ModelSource,
    target: Path,
    quant: str,
    dtype: str,
    budgets: Budgets,
    *,
    repair: bool = False,
    device_type: str | None = None,
) -> Written:
    """Writes the store at `target`, or completes one that was begun, within the host memory and the disk of `budgets`.

    Codes lie as kernels of `device_type` read them; None: of what this machine has. `repair` also reads finished stores
    and writes damaged files again. Raises DoesNotFit if the memory is too little for the largest part that is
    converted whole, OutOfBudget if the store does not fit on the disk.
    """
    written = _pack(source, target, _recipe(quant, dtype, device_type), budgets, repair)
    _keep_key_offsets(source, target, quant, dtype, budgets)
    return written


def _pack(source: ModelSource, target: Path, made_of: Mapping[str, Any], budgets: Budgets, repair: bool) -> Written:
    folder, shape, quant, dtype = source.folder, source.shape, made_of["quant"], made_of["dtype"]
    shards = model_shards(shape, quant, dtype, made_of["layout"])
    window = window_nbytes(shape, shards, dtype, budgets.host_nbytes())
    nbytes = weights_nbytes(shape, quant, dtype)
    disk_budget(target, nbytes, budgets.disk_nbytes())
    with StoreWriter(target, made_of, model_fingerprint(source.weights)) as writer:
        if writer.complete and not repair:
            return Written()
        # Packing allocates and frees the same few buffers for every chunk.
        keep_memory()
        config = ModelConfig.read(folder)
        model = define(config, TORCH_DTYPES[dtype])
        with open_checkpoint(config, source.weights) as checkpoint:
            tensors = read_tensors(config, checkpoint)
            helpers = [Workspace(0) for _ in range(torch.get_num_threads() - 1)]
            preparation = Preparation(model, checkpoint, ParallelMatmul(Workspace(0), helpers=helpers), window, tensors)
            with stage(f"writing {quant} weights", shards.nbytes, _announcement(target, nbytes)) as advance:
                preparation.run(shards, StoreSink(writer), advance)
        write_resident(writer, model, folder)
        loss = dict(preparation.loss.by_group)
        writer.finish({"shape": shape_to_json(shape), "name": source.name, "loss": loss})
        return Written(writer.nbytes_written, loss)


def _announcement(target: Path, nbytes: int) -> str:
    free = shutil.disk_usage(target).free
    begun = " (continues what an earlier run wrote)" if disk_nbytes(target) > nbytes // 100 else ""
    return (
        f"writing {gib(nbytes)} of prepared weights to {target}, once{begun}; {gib(free)} are free "
        "(--disk limits it, --disk-dir moves it)"
    )


def _keep_key_offsets(source: ModelSource, target: Path, quant: str, dtype: str, budgets: Budgets) -> None:
    """Measures the key offsets once, by a pass over the finished store, with the same bits in every budget.

    If host memory is too little for any pass, jobs with quantized keys measure them when they load.
    """
    if (target / FILE).exists():
        return
    # Keys are cached in the dtype of the run: quantized keys could not be measured.
    settings = Settings(
        dtype=dtype, quant=quant, kv=dtype, tokens_per_pass=MAX_TOKENS, max_sequences=1, deterministic=True
    )
    with suppress(DoesNotFit):
        job = Workload(1, MAX_TOKENS)
        least, _ = budget_range(source.shape, settings, job)
        plan = make_plan(source.shape, settings, MemoryBudget(min(least, budgets.host_nbytes())), job)
        with closing(load_engine(source, plan, target)) as loaded:
            keep(target, measure(loaded.model, fixed_token_ids(source.folder)))
        # An engine is a cycle of modules: collect it before the next one is loaded.
        del loaded
        gc.collect()


class FinishedStore(NamedTuple):
    """The folder of a finished store, and the bytes of it that were written just now."""

    folder: Path
    nbytes_written: int = 0


def store_for(source: ModelSource, plan: Plan, budgets: Budgets) -> FinishedStore | None:
    """The store that a plan streams from, prepared now if it is missing; None where none is needed."""
    if source.store is not None:
        return FinishedStore(source.store)
    if not plan.streams:
        return None
    device_type = "cpu" if plan.staging is None else "cuda"
    target = store_path(source, plan.quant, plan.dtype, budgets.disk_dir, device_type)
    written = prepare(source, target, plan.quant, plan.dtype, budgets, device_type=device_type)
    return FinishedStore(target, written.nbytes)
