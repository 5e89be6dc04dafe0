"""Prepares the store of a checkpoint, or finds the one that was prepared before."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...offload.budget import gib
from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.errors import BadStore
from ...offload.memory import keep_memory, return_memory, trim
from ...offload.store.manifest import MANIFEST, Manifest, read_manifest
from ...offload.store.stores import default_root, disk_budget, disk_nbytes, store_folder
from ...offload.store.writer import StoreWriter
from ...quant.matmul.matmul import ParallelMatmul, Workspace, kernel_order
from ...quant.tensor import TORCH_DTYPES
from ..model.definition import define
from ..plan.placement import Plan, Workload
from ..plan.planner import budget_range, make_plan
from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import Budgets, MemoryBudget, Settings
from ..settings.stages import Advance, stage
from ..shape.checkpoint_shape import open_checkpoint, read_tensors
from ..shape.shards import lies_unpacked, model_shards, open_formats, weights_nbytes, workspace_nbytes
from ..source.model_source import ModelSource, model_fingerprint, recipe
from ..source.stored_model import carried_files, write_resident
from ..text.tokenizer import Tokenizer
from ..weights.importance import WINDOW, Importance, moments_nbytes
from ..weights.importance import keep as keep_importance
from ..weights.importance import measure as measure_importance
from ..weights.key_offsets import FILE, MAX_TOKENS, fixed_token_ids, keep, measure
from ..weights.linking import Linker
from ..weights.preparation import CannotLink, Preparation, StoreSink, window_nbytes
from .engine_loader import load_engine
from .selftest import checked


def precision(source: ModelSource, quant: str, dtype: str) -> tuple[str, str]:
    """The weight format and dtype of a store; "auto" means the checkpoint's own. Raises SettingError for a store."""
    if source.store is not None:
        raise SettingError(f"{source.store} is a store already; give the checkpoint that it was made from")
    return open_formats(source.shape, quant)[0], source.shape.dtype if dtype == "auto" else dtype


def store_path(
    source: ModelSource,
    quant: str,
    dtype: str,
    root: Path | None,
    device_type: str | None = None,
    *,
    linked: bool = False,
    calibration: str = "",
) -> Path:
    """The path of the store of this checkpoint in this format, whether it exists or not.

    Codes lie as kernels of `device_type` read them, "cpu" or "cuda"; None: of what this machine has. `linked`: of the
    store that names what lies in the checkpoint's files. `calibration` is the digest of the text that it was calibrated
    by.
    """
    made_of = _recipe(source, quant, dtype, device_type, linked, calibration)
    return store_folder(root or default_root(), source.name, model_fingerprint(source.weights), made_of)


def _recipe(
    source: ModelSource,
    quant: str,
    dtype: str,
    device_type: str | None,
    linked: bool = False,
    calibration: str = "",
) -> Mapping[str, Any]:
    there = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    made_of = recipe(quant, dtype, kernel_order(quant, TORCH_DTYPES[dtype], there), linked, source.shape.mtp)
    return {**made_of, "calibration": calibration} if calibration else made_of


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
    budget: MemoryBudget,
    *,
    repair: bool = False,
    device_type: str | None = None,
    importance: Importance | None = None,
) -> Written:
    """Writes the store at `target`, or completes one that was begun, within the host memory and the disk of `budget`.

    Codes lie as kernels of `device_type` read them; None: of what this machine has. `repair` also reads finished stores
    and writes damaged files again. Raises DoesNotFit if the memory is too little for the largest part that is
    converted whole, OutOfBudget if the store does not fit on the disk. `importance` is kept with it.
    """
    disk_budget(target, weights_nbytes(source.shape, quant, dtype), budget.disk_nbytes)
    digest = importance.digest if importance else ""
    made_of = _recipe(source, quant, dtype, device_type, calibration=digest)
    host_nbytes = budget.host_nbytes - (importance.nbytes if importance else 0)
    written = _copy(target, source, _Making(source, made_of, host_nbytes, importance), repair)
    release_memory()
    if importance is not None:
        keep_importance(target, importance)
    _keep_key_offsets(source, target, quant, dtype, budget.host_nbytes)
    return written


def _copy(target: Path, source: ModelSource, making: _Making, repair: bool) -> Written:
    made_of = making.made_of
    with StoreWriter(target, made_of, model_fingerprint(source.weights)) as writer:
        if writer.complete and not repair:
            return Written()
        doing, note = f"writing {made_of['quant']} weights", _announcement(target, making.shards.nbytes)
        with making.opened() as checkpoint, making.stage(doing, note) as advance:
            return making.write(writer, checkpoint, StoreSink(writer, making.shards), advance)


def prepare_linked(source: ModelSource, target: Path, quant: str, dtype: str, budget: MemoryBudget) -> Written | None:
    """The same for a store at `target` that names the extents of weights in the checkpoint's own files.

    Reads the checkpoint once, for checksums, and copies what lies in the files otherwise than headers show; None where
    a part of a layer's experts does. A finished store is left as it is: opening it notices if the files have changed.
    """
    fingerprint, made_of = model_fingerprint(source.weights), _recipe(source, quant, dtype, None, linked=True)
    with suppress(FileNotFoundError, BadStore):
        found = read_manifest(target / MANIFEST)
        if found.same_making(Manifest.begin(fingerprint, made_of, found.sources)):
            return Written()
    written = _name(target, source, made_of, budget)
    release_memory()
    if written is not None:
        _keep_key_offsets(source, target, quant, dtype, budget.host_nbytes)
    return written


def _name(target: Path, source: ModelSource, made_of: Mapping[str, Any], budget: MemoryBudget) -> Written | None:
    making = _Making(source, made_of, budget.host_nbytes)
    note = f"reading {gib(making.shards.nbytes)} of weights for checksums, once; passes read them where they are"
    with making.opened() as checkpoint:
        linker = Linker(checkpoint, carried_files(source.folder))
        fingerprint = model_fingerprint(source.weights)
        with StoreWriter(target, made_of, fingerprint, linker.sources) as writer, suppress(CannotLink):
            limit = partial(disk_budget, target, wanted=budget.disk_nbytes)
            sink = StoreSink(writer, making.shards, linker, limit)
            with making.stage("checking weights", note) as advance:
                return making.write(writer, checkpoint, sink, advance, linker)
    return None


class _Making:
    """Packs the weights of a checkpoint for a store. Raises DoesNotFit where memory is too little."""

    def __init__(
        self, source: ModelSource, made_of: Mapping[str, Any], host_nbytes: int, importance: Importance | None = None
    ) -> None:
        self.made_of = made_of
        self._source = source
        self._importance = importance
        self._dtype = made_of["dtype"]
        self.shards = model_shards(source.shape, made_of["quant"], self._dtype, made_of["layout"])
        self._window = window_nbytes(source.shape, self.shards, self._dtype, host_nbytes)
        self._config = source.config

    def opened(self) -> Checkpoint:
        return open_checkpoint(self._config, self._source.weights)

    def stage(self, doing: str, note: str) -> AbstractContextManager[Advance]:
        return stage(doing, self.shards.nbytes, note)

    def write(
        self,
        writer: StoreWriter,
        checkpoint: Checkpoint,
        sink: StoreSink,
        advance: Advance,
        linker: Linker | None = None,
    ) -> Written:
        """Fills `sink` and finishes the store of `writer`; `linker` finds what lies in the checkpoint's files."""
        # Packing allocates and frees the same few buffers for every chunk.
        keep_memory()
        model = define(self._config, TORCH_DTYPES[self._dtype])
        tensors = read_tensors(self._config, checkpoint)
        helpers = [Workspace(0) for _ in range(torch.get_num_threads() - 1)]
        compute = ParallelMatmul(Workspace(0), helpers=helpers)
        preparation = Preparation(model, checkpoint, compute, self._window, tensors, self._importance)
        preparation.run(self.shards, sink, advance)
        write_resident(writer, model, checkpoint, self._source.folder, linker)
        loss = dict(preparation.loss.by_group)
        writer.finish({"shape": asdict(self._source.shape), "name": self._source.name, "loss": loss})
        return Written(writer.nbytes_written, loss)


def release_memory() -> None:
    """Returns what is free on the heap to the system: the plan of a job that follows has no bytes for it."""
    # A model, and an engine, is a circle of modules.
    gc.collect()
    return_memory()
    trim()


def _announcement(target: Path, nbytes: int) -> str:
    free = shutil.disk_usage(target).free
    begun = " (continues what an earlier run wrote)" if disk_nbytes(target) > nbytes // 100 else ""
    return (
        f"writing {gib(nbytes)} of prepared weights to {target}, once{begun}; {gib(free)} are free "
        "(--disk limits it, --disk-dir moves it)"
    )


def _keep_key_offsets(source: ModelSource, target: Path, quant: str, dtype: str, host_nbytes: int) -> None:
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
        budget = MemoryBudget(min(least, host_nbytes))
        plan = checked(source.shape, make_plan(source.shape, settings, budget, job))
        with closing(load_engine(source, plan, target)) as loaded:
            keep(target, measure(loaded.model, fixed_token_ids(source.folder)))
        # Before the next engine is loaded.
        del loaded
        release_memory()


class FinishedStore(NamedTuple):
    """The folder of a finished store, and the bytes of it that were written just now."""

    folder: Path
    nbytes_written: int = 0


def store_for(source: ModelSource, plan: Plan, budgets: Budgets) -> FinishedStore | None:
    """The store that a plan streams from, prepared now if it is missing; None where none is needed.

    Where weights lie in the checkpoint's files as they are computed with, the store names them there, unless a copy was
    prepared before.
    """
    if source.store is not None:
        return FinishedStore(source.store)
    if not plan.streams:
        return None
    # What is free may be another number by now: the weights are packed within the memory that was planned.
    budget = MemoryBudget(plan.budget.host_nbytes, disk_nbytes=budgets.disk_nbytes())
    formats = plan.quant, plan.dtype
    device_type = "cpu" if plan.staging is None else "cuda"
    target = store_path(source, *formats, budgets.disk_dir, device_type)
    if lies_unpacked(source.shape, *formats) and not (target / MANIFEST).exists():
        named = store_path(source, *formats, budgets.disk_dir, device_type, linked=True)
        if (written := prepare_linked(source, named, *formats, budget)) is not None:
            return FinishedStore(named, written.nbytes)
    return FinishedStore(target, prepare(source, target, *formats, budget, device_type=device_type).nbytes)


def calibrate(source: ModelSource, text: str, dtype: str, budgets: Budgets) -> Importance:
    """Measures how much columns of experts' matrices matter to a text, by the checkpoint's weights as they are.

    Where memory does not hold them they stream, as those of a job with `--quant none` do. Raises SettingError for a
    text without tokens.
    """
    settings = Settings(
        dtype=dtype, quant="none", kv=dtype, tokens_per_pass=WINDOW, max_sequences=1, deterministic=True
    )
    budget = budgets.on_cpu()
    room = replace(budget, host_nbytes=budget.host_nbytes - moments_nbytes(source.shape))
    plan = checked(source.shape, make_plan(source.shape, settings, room, Workload(1, WINDOW)))
    store = store_for(source, plan, budgets)
    with Tokenizer.load(source.folder) as tokenizer:
        token_ids = tokenizer.encode(text)
    if not token_ids:
        raise SettingError("the calibration text has no tokens; give one like what the model will read and write")
    workspace = Workspace(workspace_nbytes(source.shape, plan.quant, plan.dtype, deterministic=True))
    with (
        closing(load_engine(source, plan, store and store.folder)) as loaded,
        stage(f"calibrating by {len(token_ids):,} tokens"),
    ):
        found = measure_importance(loaded.model, workspace, text, token_ids)
    del loaded
    release_memory()
    return found
